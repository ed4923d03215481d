"""The symmetric memory of a run: before every operation the schedule may switch ranks, and then it is checked."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpfuse.explore.clocks import Atomic, Clock, Clocks, Line, Word
from tpfuse.explore.errors import ProtocolError, RaceError
from tpfuse.explore.explanation import explain
from tpfuse.explore.older_values import OlderValues
from tpfuse.explore.scheduler import Scheduler, WordOperation
from tpfuse.explore.shadow import Indices, Region
from tpfuse.explore.sites import Site, lines_here, text_of
from tpfuse.explore.spins import numbers_of, state_here

Addresses = NDArray[np.uint64]
Parts = list[tuple[Region, Addresses]]


@dataclass(frozen=True)
class Semantics:
    """The memory order of an atomic operation. scope: 0 within a thread block, 1 within a GPU, 2 between GPUs."""

    acquires: bool
    releases: bool
    scope: int
    modifies: bool = True  # a read-modify-write
    writes: bool = True  # False for a load
    host: bool = False
    assembly: bool = False  # see `Atomic`
    alone: bool = False


_SCOPES = ("cta", "gpu", "sys")
HOST_SIGNAL = Semantics(acquires=False, releases=True, scope=2, modifies=False, host=True)
HOST_WAIT = Semantics(acquires=True, releases=False, scope=2, modifies=False, writes=False, host=True)


class CheckedMemory:
    """The regions of one run, the clocks that order their accesses, and the source lines of these accesses.

    roots: the functions by which ranks and programs are run; the frames that these call belong to the protocol.
    """

    older: OlderValues | None = None  # if given, plain reads find older values, and races do not end the run

    def __init__(self, scheduler: Scheduler, barrier_rule: bool, roots: frozenset[CodeType]) -> None:
        self.scheduler, self._roots = scheduler, roots
        self.clocks = Clocks(barrier_rule)
        self.regions: list[Region] = []
        self.sites: list[Site] = []  # by number
        self._numbers: dict[Site, int] = {}  # the number of each site
        self._users: dict[Word, dict[tuple[int, int], tuple[int, int]]] = {}  # (chain, scope) -> last (time, site)
        self._word_lines: dict[Word, tuple[set[int], set[Line]]] = {}  # the ranks and the lines that accessed a word

    def site(self, operation: str) -> int:
        """Return the number of the site where the current thread is."""
        task = self.scheduler.current
        site = Site(operation, task.rank, task.program, task.lines or self.lines(), task.side)
        if site not in self._numbers:
            self._numbers[site] = len(self.sites)
            self.sites.append(site)
        return self._numbers[site]

    def lines(self) -> tuple[Line, ...]:
        """Return the source lines at which the current thread is."""
        return lines_here(self._roots)

    def state(self) -> tuple[Hashable, ...] | None:
        """Return what identifies the state of the kernel that runs; None in a rank, and where it is not known."""
        task = self.scheduler.current
        emulated = None if task.program is None else task.emulated(self._place)
        return None if emulated is None else (state_here(self._roots, self._place), task.some_threads, emulated)

    def _place(self, address: int) -> tuple[Hashable, int, int] | None:
        regions = ((x.identity, x.low, x.high) for x in self.regions)
        places = (*self.scheduler.current.tensors, *regions)
        return next((place for place in places if place[1] <= address < place[2]), None)

    def line_of(self, site: int) -> str:
        """Return "file:line: text" of the site with this number."""
        return text_of(self.sites[site].lines[0])

    def touched(self, addresses: Addresses) -> Parts:
        """Return the regions that these addresses are in, each with its addresses; red zones belong to regions."""
        if not addresses.size:
            return []
        low, high = int(addresses.min()), int(addresses.max())
        regions = [region for region in self.regions if region.low <= high and low < region.high]
        return [
            (region, part)
            for region in regions
            if (part := addresses[(addresses >= region.low) & (addresses < region.high)]).size
        ]

    def _inside(self, region: Region, part: Addresses, size: int, site: int) -> Indices:
        index = region.elements(part, size)
        if region.freed:
            self._refuse(f"symmetric buffer {region.key!r} of rank {region.rank} was accessed after it was freed", site)
        if len(outside := index[(index < 0) | (index >= region.count)]):
            element = f"element {int(outside[0])} of symmetric buffer {region.key!r} of rank {region.rank}"
            self._refuse(f"{element} was accessed, but the buffer has {region.count} elements", site)
        return index

    def _refuse(self, what: str, site: int) -> None:
        self.scheduler.stop(ProtocolError(f"{what}:\n  {self.sites[site]}"))

    def access(self, parts: Parts, size: int, operation: str, *, write: bool) -> WordOperation | None:
        """Let the schedule switch ranks before a plain load or store, then check it; return a load of one word."""
        task = self.scheduler.current
        site = self.site(operation)
        scalar = len(parts) == 1 and parts[0][1].size == 1
        poll = self._operation(parts, site, ordered=False) if scalar and not write else None
        self.scheduler.switch(task, site, poll)
        if poll is None:
            self.scheduler.acted(task, write)
        for region, part in parts:
            index = self._inside(region, part, size, site)
            if region.checked:
                self._check(region, index, site, write=write, atomic=False)
        if not write:
            self.scheduler.observe(task, lambda: b"".join(region.content(part, size) for region, part in parts))
        return poll

    def reading(self, *reads: tuple[Parts, int]) -> AbstractContextManager[None]:
        """Return the block in which plain loads, each of these parts by so many bytes, have to be performed."""
        if self.older is None:
            return nullcontext()
        elements = [(region, region.elements(part, size)) for parts, size in reads for region, part in parts]
        return self.older.shown(elements, self.clocks.knows[self.scheduler.current.chain])

    def written(self, parts: Parts) -> None:
        """Report a finished store: ranks that poll a word which it changed look again."""
        for _, part in parts:
            self.scheduler.changed(int(part.min()), int(part.max()))

    def loaded(self, values: NDArray[Any]) -> None:
        """Report what a program has loaded from other memory."""
        self.scheduler.observe(self.scheduler.current, lambda: numbers_of(values, self._place))

    def seen(self, result: object) -> None:
        """Report what an operation has told the current rank, other than in tensors."""
        if isinstance(result, bool | int | float | str | list):
            self.scheduler.observe(self.scheduler.current, lambda: repr(result))

    def polled(self, load: WordOperation) -> None:
        """Report a plain load of one word, which may be a poll."""
        self.scheduler.polled(self.scheduler.current, load, load.read())

    def _operation(
        self, parts: Parts, site: int, *, ordered: bool, ends: Callable[[tuple[bytes, ...]], bool] | None = None
    ) -> WordOperation:
        """Return what the schedule has to know of an operation on whole elements. ordered: whether it is atomic."""
        places = [
            (region, int(i), int(at))
            for region, part in parts
            for i, at in zip(region.elements(part, 1), part, strict=True)
        ]
        words = tuple((region.identity, i) for region, i, _ in places) if ordered else ()

        def read() -> tuple[bytes, ...]:
            return tuple(region.element(i) for region, i, _ in places)

        def where() -> str:
            named = ", ".join(f"{region.name(i)} is {region.number(i)}" for region, i, _ in places)
            return f"{self.line_of(site)}\n    {named}"

        checked = all(region.checked for region, *_ in places)
        return WordOperation(tuple(at for *_, at in places), words if checked else None, read, where, ends)

    def _check(self, region: Region, index: Indices, site: int, *, write: bool, atomic: bool) -> None:
        task = self.scheduler.current
        if self.older is not None and write:
            self.older.write(region, index, task.chain + atomic, self.clocks.time(task.chain + atomic))
        conflict = region.access(self.clocks, index, task.chain, site, write=write, atomic=atomic)
        if conflict is not None and self.older is None:
            why = explain(self.clocks, conflict.component, conflict.time, task.chain)
            self._race(region, conflict.element, conflict.site, site, why)

    def _race(self, region: Region, element: int, earlier: int, later: int, why: str) -> None:
        sites = f"\n  {self.sites[earlier]}\n  {self.sites[later]}"
        self.scheduler.stop(RaceError(f"race on {region.name(element)}: nothing orders these accesses{sites}\n  {why}"))

    def atomic(
        self,
        operation: str,
        parts: Parts,
        semantics: Semantics,
        perform: Callable[[], tuple[Any, NDArray[Any], NDArray[Any], NDArray[np.bool_]]],
        ends: Callable[[tuple[bytes, ...]], bool] | None = None,
    ) -> Any:
        """Perform an atomic operation on the words `parts`, and return its result.

        perform() returns the result, the old and the new values of the words, and whether it stored each of them. ends:
        as in `WordOperation`.
        """
        task, site = self.scheduler.current, self.site(operation)
        ready = self._operation(parts, site, ordered=True, ends=ends)
        self.scheduler.switch(task, site, ready)
        words: list[tuple[Region, int]] = []
        for region, part in parts:
            index = self._inside(region, part, region.step, site)
            words += [(region, int(element)) for element in index]
            if region.checked:
                self._check(region, index, site, write=semantics.writes, atomic=True)
        for region, element in words:
            if region.checked:
                self._scope(region, element, semantics.scope, site)
        values = ready.read()
        result, old, new, stored = perform()
        for (region, element), done in zip(words, stored.tolist(), strict=True):
            if region.checked:
                self._order(region, element, semantics, bool(done), site)
        changed = stored & (old != new)
        acted = stored & (changed | semantics.releases | (not semantics.modifies)) & semantics.writes
        self.scheduler.performed(task, ready, values, changed, acted)
        return result

    def _order(self, region: Region, element: int, semantics: Semantics, stored: bool, site: int) -> None:
        word = self.regions.index(region), element
        line = self.sites[site].lines[0]
        self.clocks.atomic(
            Atomic(
                self.scheduler.current.chain,
                word,
                line,
                releases=semantics.releases,
                acquires=semantics.acquires,
                stores=stored and semantics.writes,
                modifies=semantics.modifies,
                host=semantics.host,
                assembly=semantics.assembly,
                alone=semantics.alone,
            )
        )

    def _scope(self, region: Region, element: int, scope: int, site: int) -> None:
        """Report a race if an earlier atomic operation on the word is unordered and a scope is too narrow.

        Two operations on one word that are not otherwise ordered are atomic to each other, and order other accesses,
        only if the scopes of both include the two programs.
        """
        task = self.scheduler.current
        word = self.regions.index(region), element
        users = self._users.setdefault(word, {})
        ranks, lines = self._word_lines.setdefault(word, (set(), set()))
        ranks.add(task.rank)
        lines.add(self.sites[site].lines[0])
        known = self.clocks.knows[task.chain]
        for (chain, other), (time, other_site) in users.items():
            needed = 2 if self.sites[other_site].rank != task.rank else 1
            if chain != task.chain and min(scope, other) < needed and time > known[chain + 1] and self.older is None:
                where = "two ranks" if needed == 2 else "two programs"
                narrow = self.line_of(site if scope < needed else other_site)
                why = (
                    f'scope="{_SCOPES[min(scope, other)]}" spans no {where}: "{_SCOPES[needed]}" is needed at {narrow}'
                )
                self._race(region, element, other_site, site, why)
        users[task.chain, scope] = self.clocks.time(task.chain + 1), site

    def shared_lines(self) -> set[Line]:
        """Return the lines of the atomic operations on words that two ranks have accessed."""
        return {line for ranks, lines in self._word_lines.values() if len(ranks) > 1 for line in lines}

    def words(self) -> Iterator[tuple[Region, int, tuple[int, ...]]]:
        """Yield all words on which atomic operations were performed, and the scopes of these, by region."""
        for (number, element), users in sorted(self._users.items()):
            yield self.regions[number], element, tuple(sorted({scope for _, scope in users}))

    def published(self) -> dict[Hashable, Clock]:
        """Return the clock at each word, in the order of their regions."""
        words = sorted(self.clocks.published.items())
        return {(self.regions[number].identity, element): clock for (number, element), clock in words}

    def unknown(self, region: Region, streams: Sequence[int], published: Mapping[Hashable, Clock]) -> Hashable:
        """Return the accesses to a region that some stream does not know, with the streams and words that know them."""
        streams_know, words_know = self.clocks.knows[list(streams)], list(published.values())
        found = []
        for kind, accessors, times in region.accesses():
            elements = np.flatnonzero((times > streams_know[:, accessors]).any(0))
            rows = np.array([*streams_know, *words_know])[:, accessors[elements]]
            found.append((kind, elements.tobytes(), np.packbits(times[elements] <= rows).tobytes()))
        return tuple(sorted(found))

    def host_word(
        self,
        operation: str,
        region: Region,
        index: int,
        semantics: Semantics = HOST_WAIT,
        change: Callable[[int], int | None] = lambda old: None,
        ends: Callable[[int], bool] | None = None,
    ) -> int:
        """Return the old value of a word, which becomes change(old value) unless that is None.

        ends: whether a value ends a wait, to which it makes no other difference.
        """
        word = region.words[index : index + 1]

        def perform() -> tuple[int, NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
            old, new = word.copy(), change(int(word[0]))
            if new is not None:
                word[0] = np.int64(new).astype(np.int32)
            return int(old[0]), old, word.copy(), np.array([new is not None])

        address = np.array([region.base + index * region.step], np.uint64)
        known = (lambda values: ends(int.from_bytes(values[0], "little", signed=True))) if ends is not None else None
        return int(self.atomic(operation, [(region, address)], semantics, perform, known))
