"""The options of the commands that need the library alone, without the packages of the extra `train`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DoctorCommand:
    """Find out what of this machine makes tpfuse fail or slow, and what it will use.

    The exit status is 1 if something will fail. Notes do not change it.
    """

    json: bool = field(default=False, metadata={"help": "Print one JSON document instead of text."})


@dataclass(frozen=True)
class VerifyCommand:
    """Compare every kernel with its reference on this machine.

    This takes some minutes on two CPU cores. The exit status is 1 if one fails.
    """

    operators: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Operators to verify, such as gemm. The name training stands for two training steps of the small"
            " GPT on two ranks with each implementation of tensor parallelism. (default: all)"
        },
    )
    json: bool = field(default=False, metadata={"help": "Print one JSON document instead of tables."})
