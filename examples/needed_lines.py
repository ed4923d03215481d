# TRITON_INTERPRET=1 python examples/needed_lines.py
import hand_over

from tpfuse.explore.mutants import mutants_of, surviving

left = surviving(lambda changed: changed.protocol, [hand_over], world=2)
print(f"{len(mutants_of(hand_over))} mutants:", *left or ["every line is needed"])
