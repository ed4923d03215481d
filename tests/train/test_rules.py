"""Options that exclude each other: every pair of the table is refused, and neither option alone is."""

from dataclasses import replace
from pathlib import Path

import pytest

from tpfuse.errors import UserError
from tpfuse.train.options import TrainCommand
from tpfuse.train.rules import RULES, Rule, check_rules, forbids_graph

ROOT = Path(__file__).resolve().parents[2]


def given(options: TrainCommand, option: str, value: int = 0) -> TrainCommand:
    """Return `options` with one of the values that the option of a rule means, or another one if it means any."""
    flag, *meant = option.split()
    section, name = flag.removeprefix("--").replace("-", "_").split(".")
    own = getattr(options, section)
    name = name if hasattr(own, name) else f"{name}_"
    usual = getattr(own, name)
    if not meant:
        chosen: object = True if usual is False else Path("folder")
    else:
        chosen = int(meant[0][:-1]) if meant[0].endswith("+") else meant[value]
    return replace(options, **{section: replace(own, **{name: chosen})})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.option}, {rule.other}")
def test_both_options_of_a_rule_are_refused_and_each_alone_is_not(rule: Rule) -> None:
    usual = TrainCommand()
    for value in range(max(1, len(rule.option.split()) - 1)):
        alone = given(usual, rule.option, value)
        with pytest.raises(
            UserError, match=f"^{rule.option.split()[0]}.* is not for {rule.other.split()[0]}"
        ) as caught:
            check_rules(given(alone, rule.other))
        assert str(caught.value).endswith(f", {rule.reason}: leave one of them out")
        check_rules(alone)
    check_rules(given(usual, rule.other))
    assert forbids_graph(given(usual, rule.other)) or not rule.option.startswith("--train.cuda-graph")


def test_the_page_has_the_table() -> None:
    rows = [f"| `{rule.option}` | `{rule.other}` | {rule.reason} |" for rule in RULES]
    assert "\n".join(rows) + "\n\n" in (ROOT / "docs" / "training.md").read_text()
