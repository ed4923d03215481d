"""Every implementation delivers every message, in its order and unchanged. Integers differ in each message."""

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.message_rings import ring
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation
from tpfuse.comm.dispatch import choice_for
from tpfuse.comm.messages import Message, Messages, Route, open_messages, reason_of
from tpfuse.comm.messages.collective import CollectiveMessages
from tpfuse.comm.messages.fused import FusedMessages
from tpfuse.comm.messages.symmetric import DirectMessages
from tpfuse.comm.trace import Recorder, observed
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks, pool

CPU = torch.device("cpu")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("direct", "fused", "collective")
KINDS = {"direct": DirectMessages, "fused": FusedMessages, "collective": CollectiveMessages}
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def opened(
    name: Implementation, routes: Sequence[Route], nbytes: int, group: dist.ProcessGroup | None = None
) -> Messages:
    with use(implementation=name):
        messages = open_messages(group or _world(), CPU, torch.float32, routes, nbytes)
    assert type(messages) is KINDS[name]
    return messages


def content(number: int, source: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a message's numbers, which are different in messages that are near each other."""
    size = torch.Size(shape).numel()
    return ((torch.arange(size) + 5 * number + 3 * source) % 101).view(shape).to(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))


def _send_around(
    name: Implementation, slots: int, turns: Sequence[tuple[tuple[int, ...], torch.dtype]], apart: bool = False
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    routes = ring(world, slots)
    messages = opened(name, routes, 16 * 1000, dist.new_group())
    if apart and isinstance(messages, CollectiveMessages):
        messages._open_groups()
    for number, (shape, dtype) in enumerate(turns):
        for index, route in enumerate(routes):
            if route.source == rank:
                x = content(number, index, *shape, dtype=dtype)
                messages.send(index, x.t().contiguous().t() if x.ndim == 2 else x)  # strides do not matter
        for index, route in enumerate(routes):
            if route.target == rank:
                message = messages.receive(index, shape, dtype)
                assert message.number == number
                assert same(message.tensor, content(number, index, *shape, dtype=dtype)), (number, route)
                messages.release(index, message)
    messages.finish()


@pytest.mark.parametrize(("world", "slots"), [(2, 1), *exhaustive((4, 2))])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@on_ranks("world")
def test_messages_go_both_ways_around_a_ring(name: Implementation, slots: int) -> None:
    turns = [(shape, torch.float32) for shape in ((63,), (1000,), (), (0,), (7, 3))]
    _send_around(name, slots, [*turns, *(((63,), dtype) for dtype in DTYPES)])


@on_ranks(3)
def test_routes_may_have_groups_of_their_own_as_with_nccl() -> None:
    """Each rank of a ring makes the groups of two routes, at other places in the order of its own groups."""
    _send_around("collective", 1, [((3, 5), torch.float32)] * 2, apart=True)


@pytest.mark.parametrize(("world", "slots"), [(2, 3), *exhaustive((3, 2))])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@on_ranks("world")
def test_many_messages_in_few_slots(name: Implementation, slots: int) -> None:
    """The source is ahead by as many messages as there are slots, and the target releases some of them early."""
    rank, world = dist.get_rank(), dist.get_world_size()
    messages = opened(name, [Route("x", 0, world - 1, slots)], 4 * 1000, dist.new_group())
    if rank == 0:
        x = torch.empty(63)
        for number in range(40):
            sent = x if name != "collective" else torch.empty(63)
            messages.send(0, sent.copy_(content(number, 0, 63)))
        messages.finish()
    elif rank == world - 1:
        held: dict[int, Message] = {}

        def release(number: int) -> None:
            assert same(held[number].tensor, content(number, 0, 63)), "it has not been overwritten"
            messages.release(0, held.pop(number))

        for number in range(40):
            if held and number % 3 == 0:
                release(max(held))  # the others stay, although they are older
            if number - slots in held:
                release(number - slots)
            held[number] = messages.receive(0, (63,), torch.float32)
            assert held[number].number == number
        for number in sorted(held, reverse=True):
            release(number)


@on_ranks(2)
def test_a_message_is_read_where_it_was_written() -> None:
    """The first slot serves again after its release, and a message may be saved by autograd until then."""
    rank = dist.get_rank()
    for name in ("direct", "fused"):
        messages = opened(name, [Route(f"zero copy {name}", 0, 1, 2)], 12)
        if rank == 0:
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            for turn in range(3):
                messages.send(0, x * (turn + 1))
            continue
        first, second = (messages.receive(0, (3,), torch.float32) for _ in range(2))
        assert first.tensor.data_ptr() != second.tensor.data_ptr()
        y = first.tensor.requires_grad_()
        (y * y * second.tensor).sum().backward()
        assert y.grad is not None and y.grad.tolist() == [4.0, 16.0, 36.0]
        messages.release(0, first)
        third = messages.receive(0, (3,), torch.float32)
        assert third.tensor.data_ptr() == first.tensor.data_ptr() and third.tensor.tolist() == [3.0, 6.0, 9.0]
        messages.release(0, third)
        messages.release(0, second)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@on_ranks(2)
def test_wrong_calls_are_refused(name: Implementation) -> None:
    rank, group = dist.get_rank(), dist.new_group()
    messages = opened(name, [Route("x", 0, 1, 1), Route("y", 0, 1, 1)], 8, group)
    if rank == 0:
        with pytest.raises(ValueError, match="receive x: this is rank 0, but rank 1 receives it"):
            messages.receive(0, (2,), torch.float32)
        with pytest.raises(ValueError, match=r"send x: torch.float32 \(3,\) has 12 bytes: the routes were"):
            messages.send(0, torch.ones(3))
        messages.send(0, torch.ones(2))
        messages.send(1, torch.ones(2))
        messages.finish()
        return
    with pytest.raises(ValueError, match="send x: this is rank 1, but rank 0 sends it"):
        messages.send(0, torch.ones(2))
    with pytest.raises(ValueError, match="receive x: 12 bytes: the routes were opened for 8"):
        messages.receive(0, (3,), torch.float32)
    message, other = messages.receive(0, (2,), torch.float32), messages.receive(1, (2,), torch.float32)
    with pytest.raises(ValueError, match="receive x, message 1: message 0 is not released yet, and the route"):
        messages.receive(0, (2,), torch.float32)
    with pytest.raises(ValueError, match="release of y, message 0: it was released already, or"):
        messages.release(1, message)
    messages.release(0, message)
    messages.release(1, other)
    with pytest.raises(ValueError, match="release of x, message 0: it was released already"):
        messages.release(0, message)


def test_the_reason_does_not_say_that_messages_will_be_measured() -> None:
    for device, wanted, reason in (
        ("cuda", "auto", "the default on GPUs; messages are not measured"),
        ("cuda", "collective", "chosen"),
        ("cpu", "auto", "CPU ranks of one host"),
    ):
        assert reason_of(choice_for(device, torch.float32, wanted, "auto", "")) == reason  # type: ignore[arg-type]


@on_ranks(2)
def test_fused_messages_are_not_captured_in_a_graph() -> None:
    group, capturing = dist.new_group(), mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    messages = opened("fused", [Route("x", 0, 1, 1)], 8, group)
    assert isinstance(messages, FusedMessages)
    on_gpu = mock.patch.object(messages._memory, "device", torch.device("cuda"))
    source = dist.get_rank() == 0
    with (
        capturing,
        on_gpu,
        pytest.raises(RuntimeError, match=f"^{'send' if source else 'receive'} x.*: messages cannot"),
    ):
        messages.send(0, torch.ones(2)) if source else messages.receive(0, (2,), torch.float32)
    if source:
        messages.send(0, torch.ones(2))
    else:
        assert messages.receive(0, (2,), torch.float32).number == 0, "the refused message is not counted"


@on_ranks(2)
def test_routes_that_cannot_be_are_refused() -> None:
    for route in (Route("x", 0, 0, 1), Route("x", 0, 2, 1), Route("x", -1, 1, 1)):
        with pytest.raises(ValueError, match=f"'x' from rank {route.source} to rank {route.target}: expected two"):
            open_messages(_world(), CPU, torch.float32, [route], 4)
    with pytest.raises(ValueError, match="route 'x' with 0 slots: expected at least 1"):
        open_messages(_world(), CPU, torch.float32, [Route("x", 0, 1, 0)], 4)
    with pytest.raises(ValueError, match="messages of at most 0 bytes: expected at least 1"):
        open_messages(_world(), CPU, torch.float32, [Route("x", 0, 1, 1)], 0)
    for name in IMPLEMENTATIONS:
        assert opened(name, [], 4, dist.new_group()).finish() is None
        with use(implementation=name), pytest.raises(ValueError, match=r"rank \d opens .* rank \d opens .* expected"):
            open_messages(_world(), CPU, torch.float32, [Route("x", 0, 1, 1 + dist.get_rank())], 4)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@on_ranks(2)
def test_routes_may_be_opened_again(name: Implementation) -> None:
    rank, routes, group = dist.get_rank(), [Route("x", 0, 1, 1)], dist.new_group()
    for turn in range(2):
        messages = opened(name, routes, 4, group)
        if rank == 0:
            messages.send(0, torch.tensor([turn + 1.0]))
            messages.finish()
        else:
            message = messages.receive(0, (1,), torch.float32)
            assert message.tensor.tolist() == [turn + 1.0]
            messages.release(0, message)


def _traced(name: Implementation) -> tuple[list[tuple[str, str, int | None, str]], list[str]]:
    rank, group = dist.get_rank(), dist.new_group()
    messages = opened(name, [Route("x", 0, 1, 1)], 4, group)
    recorder = Recorder(CPU)
    with observed(recorder):
        if rank == 0:
            messages.send(0, torch.ones(1))
            messages.finish()
        else:
            messages.release(0, messages.receive(0, (1,), torch.float32))
    return [(x.kind, x.name, x.peer, x.flow) for x in recorder.ended], [flow for flow, _ in recorder.signals]


@pytest.mark.parametrize("name", ["direct", "collective"])
def test_a_trace_has_the_message_on_both_ranks(name: Implementation) -> None:
    (source, signals), (target, _) = pool(2).run(_traced, name)
    assert "send x, message 0" in [text for kind, text, *_ in source if kind == "communication"]
    waits = [flow for _, text, peer, flow in target if text == "receive x, message 0" and peer == 0]
    assert waits and waits[0] in signals, "what rank 1 waits for is what rank 0 signals"
