"""`tpfuse plan` finds the layout that trains a model fastest, and says what it costs and why it wins."""

import json
from dataclasses import replace
from pathlib import Path

import tomli_w

from tpfuse.commands.plan.planned import PER_NODE, PlannedModel, planned_cluster, planned_model, sources_of
from tpfuse.commands.plan.report import GIB, PlanReport, missing, named
from tpfuse.commands.plan.search import (
    SearchResult,
    search,
    shapes,
    smallest,
    tensor_ranks,
    train_options,
    usable_memory,
)
from tpfuse.errors import UserError
from tpfuse.plan.hardware import Cluster
from tpfuse.plan.sizes import RankLayout
from tpfuse.train.config import resolved
from tpfuse.train.options import PlanCommand

_MOST_GPUS = 2**20


def plan(command: PlanCommand) -> str:
    """Return the report of `tpfuse plan`, or, for --json -, its JSON document. Raise UserError."""
    if command.calibrate is not None:
        if replace(command, calibrate=None) != PlanCommand():
            raise UserError(f"--calibrate {command.calibrate} measures and plans nothing: leave out the other options")
        from tpfuse.commands.plan.calibrate import calibrate  # it imports what only ranks need

        return calibrate(command.calibrate)
    cluster = planned_cluster(command)
    model = planned_model(command)
    _check_batch(model, cluster)
    found = search(model, cluster)
    if not found.fitting:
        raise UserError(_nothing_fits(model, cluster, found))
    report = PlanReport(model, cluster, found, train_options(model, found.best[0].layout), sources_of(command, cluster))
    written = []
    if command.toml is not None:
        _write(command.toml, tomli_w.dumps(resolved(report.options)))
        written.append(f"{command.toml}: the options of the best layout, for tpfuse train --config")
    if command.json:
        text = json.dumps(report.document(), indent=1)
        if command.json == "-":
            return text
        _write(Path(command.json), text)
        written.append(f"{command.json}: all layouts that fit")
    return "\n".join([*report.lines(), *([""] if written else []), *written])


def _check_batch(model: PlannedModel, cluster: Cluster) -> None:
    """Raise UserError if no layout divides the batch."""
    if any(True for _ in shapes(model, cluster)):
        return
    batch, ranks = model.options.train.batch, tensor_ranks(model, cluster)
    raise UserError(
        f"a batch of {batch} sequences cannot be divided among {cluster.gpus} GPUs by any layout (tp can be one of"
        f" {ranks}): --batch {-(-batch // cluster.gpus) * cluster.gpus} can"
    )


def _nothing_fits(model: PlannedModel, cluster: Cluster, found: SearchResult) -> str:
    nearest = found.nearest[0]
    message = (
        f"{model.sizes.name} fits no layout of {cluster.gpus} x {cluster.gpu.name}: the nearest,"
        f" {named(nearest.layout)}, needs {nearest.memory.total / GIB:.1f} GiB on a rank,"
        f" {missing(nearest, cluster):.1f} GiB more than is usable"
    )
    enough = _enough(model, cluster)
    if enough is None:
        return f"{message}; no number of these GPUs up to {_MOST_GPUS:,} is enough"
    return f"{message}; {enough.ranks} of these GPUs are enough: {named(enough)}, with a batch of {enough.batch}"


def _enough(model: PlannedModel, cluster: Cluster) -> RankLayout | None:
    """Return a layout that fits, on the cluster's number of GPUs doubled as often as it takes; None if none does."""
    gpus, options = cluster.gpus, model.options
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        per_node = cluster.per_node if cluster.per_node < cluster.gpus else max(cluster.per_node, min(gpus, PER_NODE))
        batch = -(-options.train.batch // gpus) * gpus
        larger = replace(model, options=replace(options, train=replace(options.train, batch=batch)))
        layout, memory = smallest(larger, replace(cluster, gpus=gpus, per_node=per_node))
        if memory.total <= usable_memory(cluster):
            return layout
    return None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
