"""Linear attention, state spaces and short convolutions by their heads: which rows of its tensors a rank computes with.

Such a mixer has projections in, a convolution of each channel by itself, a recurrence of each head by itself, and a
projection out. Their own code runs on every rank, with the rank's heads. It packs queries, keys and values, or gates,
inputs, states and time steps, one after another in the rows of its tensors: these are the sections below. As with all
names, the proof decides.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from tpfuse.drop_in.converted import Ranges
from tpfuse.drop_in.heads import Sections, section_ranges


@dataclass(frozen=True)
class Mixer:
    """Where the heads of a mixer lie: in its linears and its convolution, in buffers, and as sizes in its attributes.

    heads, size: their number, and the features of each that the projection out reads. units: the number that the ranks
    must divide, of heads, or of key heads if each is packed with its values. outer, conv: the names of that
    projection and of the convolution. sections: by the names of the projections in, of the convolution, of buffers, of
    parameters of other modules, and of attributes that are the number of such rows; none for a projection to features
    of all heads, from which another one makes those of each.
    """

    heads: int
    size: int
    units: int
    outer: str
    conv: str
    sections: dict[str, Sections]

    def ranges(self, name: str, ranks: int) -> list[Ranges]:
        """Return the rows [start, stop) of what has this name that each rank uses."""
        return section_ranges(self.sections[name], self.heads, ranks)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module is a mixer, whose heads may or may not be found."""
    try:
        return mixer_of(module) is not None
    except NotImplementedError:
        return True


def mixer_of(module: nn.Module) -> Mixer | None:
    """Return where the heads of a mixer lie; None for a module of another kind.

    Raise NotImplementedError if its sizes contradict each other.
    """
    children: dict[str, Any] = dict(module.named_children())
    conv = next((name for name, child in children.items() if isinstance(child, nn.Conv1d)), None)
    outer = next((name for name in ("out_proj", "o_proj") if name in children), None)
    if conv is None or outer is None:
        return None
    channels: int = children[conv].in_channels
    sizes = {name: x for name, x in vars(module).items() if type(x) is int}
    if {"num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"} <= sizes.keys():
        (shared, heads), size = (sizes["num_k_heads"], sizes["num_v_heads"]), sizes["head_v_dim"]
        sections = _of_delta_rule(shared, heads, sizes["head_k_dim"], size)
    elif {"num_heads", "head_dim", "n_groups", "ssm_state_size"} <= sizes.keys():
        shared, heads, size = sizes["n_groups"], sizes["num_heads"], sizes["head_dim"]
        sections = _of_state_space(shared, heads, size, sizes["ssm_state_size"])
    elif {"num_heads", "head_dim"} <= sizes.keys() and "forget_gate" in children:
        shared = heads = sizes["num_heads"]
        size = sizes["head_dim"]
        sections = _of_channel_decay(heads, size)
    elif "in_proj" in children:
        shared, heads, size = channels, channels, 1
        packed = getattr(children["in_proj"], "out_features", channels) // channels
        sections = {"in_proj": ((channels, 1),) * packed, conv: ((channels, 1),)}
    else:
        return None
    rows = sum(heads * size for heads, size in sections.get(conv, ()))
    if shared < 1 or heads % shared or rows != channels or channels != children[conv].groups:
        raise NotImplementedError(f"{heads} heads and {shared} groups of them do not fit its convolution of {channels}")
    parts = (module.named_modules(), module.named_parameters(), module.named_buffers())
    names = {*sizes, *(name for part in parts for name, _ in part)}
    there = {name: x for name, x in sections.items() if name in names}
    return Mixer(heads, size, shared if "in_proj_qkvz" in there else heads, outer, conv, there)


def _of_delta_rule(shared: int, heads: int, key_size: int, size: int) -> dict[str, Sections]:
    """Gated DeltaNet of Qwen3-Next (all of a key head packed), Qwen3.5 (some), OLMo-Hybrid (nothing)."""
    keys, values, run = (shared, key_size), (heads, size), heads // max(shared, 1)
    packed = (keys, keys, values)
    return {
        "in_proj_qkvz": ((shared, 2 * key_size + 2 * run * size),), "in_proj_ba": ((shared, 2 * run),),
        "in_proj_qkv": packed, "conv1d": packed, "conv_dim": packed,
        "q_proj": (keys,), "k_proj": (keys,), "key_dim": (keys,), "num_k_heads": ((shared, 1),),
        "v_proj": (values,), "g_proj": (values,), "in_proj_z": (values,), "value_dim": (values,),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b", "num_v_heads"), ((heads, 1),)),
    }  # fmt: skip


def _of_channel_decay(heads: int, size: int) -> dict[str, Sections]:
    """Kimi Delta Attention of Kimi Linear, whose gates are products of two matrices, and of Ling, with one for each."""
    features, scalars = ((heads, size),), ((heads, 1),)
    gates = "g_proj", "g_b_proj", "forget_gate.f_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias"
    return {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", *gates, "qkv_dim"), features), "conv1d": features * 3,
        **dict.fromkeys(("b_proj", "forget_gate.A_log", "num_heads"), scalars),
        **dict.fromkeys(("g_a_proj", "forget_gate.f_a_proj"), ()),
    }  # fmt: skip


def _of_state_space(groups: int, heads: int, size: int, state: int) -> dict[str, Sections]:
    """Mamba-2 of Nemotron-H, Bamba and Falcon-H1: gates, inputs, the B and C of each group, time steps."""
    inner, of_groups, steps = (heads, size), (groups, state), (heads, 1)
    packed = (inner, inner, of_groups, of_groups, steps)
    return {
        "in_proj": packed, "mup_vector": packed,
        "conv1d": (inner, of_groups, of_groups), "conv_dim": (inner, of_groups, of_groups),
        "intermediate_size": (inner,), "num_heads": (steps,), "n_groups": ((groups, 1),),
    }  # fmt: skip
