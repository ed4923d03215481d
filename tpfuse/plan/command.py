"""`tpfuse plan` finds the layout that trains a model fastest, and says what it costs and why it wins."""

import json
from dataclasses import replace
from pathlib import Path

import tomli_w

from tpfuse.cost.hardware import Cluster
from tpfuse.cost.layout import Layout
from tpfuse.cost.step import played_step
from tpfuse.plan.cluster import PER_NODE, planned_cluster, sources_of
from tpfuse.plan.model import PlannedModel, planned_model
from tpfuse.plan.report import GIB, Report, missing, named
from tpfuse.plan.search import Found, search, shapes, smallest, tensor_ranks, train_options, usable_memory
from tpfuse.train.config import resolved
from tpfuse.train.errors import UserError
from tpfuse.train.options import PlanCommand

_MOST_GPUS = 2**20


def plan(command: PlanCommand) -> str:
    """Returns the report of `tpfuse plan`, or, for --json -, its JSON document. Raises UserError."""
    if command.calibrate is not None:
        if replace(command, calibrate=None) != PlanCommand():
            raise UserError(f"--calibrate {command.calibrate} measures and plans nothing: leave out the other options")
        from tpfuse.plan.calibrate import calibrate  # it imports what only ranks need

        return calibrate(command.calibrate)
    cluster = planned_cluster(command)
    model = planned_model(command)
    _check_batch(model, cluster)
    found = search(model, cluster)
    if not found.fitting:
        raise UserError(_nothing_fits(model, cluster, found))
    report = Report(model, cluster, found, train_options(model, found.best[0].layout), sources_of(command, cluster))
    written = []
    if command.toml is not None:
        _write(command.toml, tomli_w.dumps(resolved(report.options)))
        written.append(f"{command.toml}: the options of the best layout, for tpfuse train --config")
    if command.picture is not None:
        layout = _draw(command.picture, model, cluster, found)
        written.append(f"{command.picture}: the predicted schedule of {layout}")
    if command.json:
        text = json.dumps(report.document(), indent=1)
        if command.json == "-":
            return text
        _write(Path(command.json), text)
        written.append(f"{command.json}: all layouts that fit")
    return "\n".join([*report.lines(), *([""] if written else []), *written])


def _check_batch(model: PlannedModel, cluster: Cluster) -> None:
    """Raises UserError if no layout divides the batch."""
    if any(True for _ in shapes(model, cluster)):
        return
    batch, ranks = model.options.train.batch, tensor_ranks(model, cluster)
    raise UserError(
        f"a batch of {batch} sequences cannot be divided among {cluster.gpus} GPUs by any layout (tp can be one of"
        f" {ranks}): --batch {-(-batch // cluster.gpus) * cluster.gpus} can"
    )


def _nothing_fits(model: PlannedModel, cluster: Cluster, found: Found) -> str:
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


def _enough(model: PlannedModel, cluster: Cluster) -> Layout | None:
    """Returns a layout that fits, on the cluster's number of GPUs doubled as often as it takes; None if none does."""
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


def _draw(path: Path, model: PlannedModel, cluster: Cluster, found: Found) -> str:
    """Draws the schedule of the best layout that is a pipeline, and returns the layout in words."""
    layout = next((each.layout for each in found.best if each.layout.pp > 1), None)
    if layout is None:
        raise UserError(f"--picture {path}: no layout that fits is a pipeline")
    played = played_step(model.sizes, layout, cluster, model.program)
    from tpfuse.train.pipeline_picture import picture  # matplotlib takes long to import

    try:
        gpus = f"{cluster.gpus:,} x {cluster.gpu.name}"
        picture(played, None, 0, gpus).savefig(path, format="png", bbox_inches="tight")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return named(layout)
