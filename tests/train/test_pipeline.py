"""Every schedule and layout of a pipeline trains from one seed to the losses and weights of one rank."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, Result, check_same, options_of, trained

STEPS, TOLERANCE = 10, 1e-9
Layout = dict[str, Any]


@functools.cache
def on_one_rank(layers: int) -> Result:
    return trained(options_of(), STEPS, "auto", None, None, replace(CONFIG, n_layer=layers))[0]


LAYOUTS: list[Layout] = [
    {"pp": 2, "pp_layers": "1,3", "dp": 2, "stage": 2, "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 6},
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp": 2, "stage": 3, "accumulation": 6},
    {"pp": 2, "pp_schedule": "zero_bubble", "cp": 2, "stage": 1, "accumulation": 6, "recompute": "full"},
    {"pp": 4, "pp_schedule": "zero_bubble", "accumulation": 6, "offload": "host"},
    {"pp": 3, "pp_schedule": "gpipe", "accumulation": 4, "recompute": "selective"},
]
MORE: list[Layout] = [
    *({"pp": pp, "accumulation": count} for pp in (2, 3, 4) for count in (1, 2, 9)),
    *({"pp": pp, "pp_schedule": "gpipe", "accumulation": 6} for pp in (2, 4)),
    *(
        {"pp": pp, "pp_schedule": schedule, "pp_stages_per_rank": each, "layers": pp * each, "accumulation": 12}
        for pp in (2, 3, 4)
        for schedule, numbers in (("interleaved_1f1b", (2, 3)), ("zero_bubble", (1, 2, 3)), ("zbv", (2,)))
        for each in numbers
    ),
    {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_layers": "1,1,3,2", "layers": 7, "accumulation": 4},
    {"pp": 3, "pp_schedule": "zero_bubble", "pp_layers": "3,1,1", "layers": 5, "accumulation": 6},
    {"pp": 2, "pp_schedule": "zbv", "pp_layers": "2,1,3,1", "layers": 7, "accumulation": 6},
    *(
        {"pp": 2, "pp_schedule": schedule, "accumulation": 6, **more}
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
        for more in (
            {"tp": 2},
            {"cp": 2},
            {"tp": 2, "cp": 2},
            {"dp": 2, "tp": 2, "stage": 3},
            {"dp": 2, "cp": 2, "stage": 2},
            *({"dp": 2, "stage": stage} for stage in (0, 1, 2, 3)),
            {"recompute": "selective"},
            {"recompute": "full"},
            {"dp": 2, "stage": 3, "recompute": "full"},
        )
    ),
    {"pp": 2, "dp": 4, "stage": 3, "replicas": 2, "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "dp": 4, "stage": 3, "replicas": 2, "accumulation": 3},
    {"pp": 2, "dp": 3, "stage": 1, "offload": "host", "accumulation": 3},
    {"pp": 2, "pp_schedule": "zbv", "dp": 2, "stage": 2, "offload": "a folder", "accumulation": 3},
    {"pp": 2, "stage": 3, "accumulation": 6},
    {"pp": 2, "cp": 2, "stage": 3, "cp_schedule": "ring", "accumulation": 6},
    *({"pp": 2, "tp": 2, "accumulation": 6, "name": name} for name in ("direct", "collective")),
    *({"pp": 2, "pp_schedule": "zbv", "tp": 2, "accumulation": 6, "name": name} for name in ("direct", "collective")),
    {"pp": 2, "pp_schedule": "zero_bubble", "tp": 2, "dp": 2, "stage": 2, "accumulation": 6, "name": "direct"},
]


@pytest.mark.parametrize("layout", [*LAYOUTS, *exhaustive(*MORE)], ids=str)
def test_every_schedule_and_layout_gives_the_same_losses_and_weights(tmp_path: Path, layout: Layout) -> None:
    layout = dict(layout)
    layers, name = layout.pop("layers", 4), layout.pop("name", "auto")
    if layout.get("offload") == "a folder":
        layout["offload"] = str(tmp_path)
    expected, config = on_one_rank(layers), replace(CONFIG, n_layer=layers)
    for found in trained(options_of(**layout), STEPS, name, None, None, config):
        check_same(found, expected, TOLERANCE)
