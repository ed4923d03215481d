"""`tpfuse doctor`: find out what of this machine makes tpfuse fail or slow, and what tpfuse will use on it.

The checks are in `tpfuse.tools.host_checks`, `gpu_checks` and `environment_checks`. They only read facts from a
`Machine`, so tests pass them simulated machines.
"""

import json
from dataclasses import asdict
from itertools import groupby

import torch

from tpfuse.backend import chosen_implementation, chosen_kernels, resolved_kernels
from tpfuse.comm.choice import decide
from tpfuse.comm.cuda_memory import CudaMemory
from tpfuse.comm.shared_memory import SharedMemory
from tpfuse.tools.environment_checks import environment_findings
from tpfuse.tools.gpu_checks import gpu_findings
from tpfuse.tools.host_checks import host_findings
from tpfuse.tools.machine import Finding, Gpu, Machine
from tpfuse.train.messages import say

_USE = "what tpfuse will use"


def examine(machine: Machine) -> list[Finding]:
    """Returns all findings about a machine, those of one topic together."""
    gpus = machine.gpus()
    found = [*host_findings(machine, max(2, len(gpus))), *gpu_findings(machine), *environment_findings(machine)]
    topics = list(dict.fromkeys(finding.topic for finding in found))
    found.sort(key=lambda finding: topics.index(finding.topic))
    return [*found, *_used(machine, gpus)]


def _used(machine: Machine, gpus: list[Gpu]) -> list[Finding]:
    """Returns which kernels, memory and implementation ranks of this machine use, each with its reason."""
    device, where = ("cuda", "GPUs") if gpus else ("cpu", "CPUs")
    kernels, chosen = resolved_kernels(device), chosen_kernels()
    name = "interpreted Triton kernels" if machine.interpreted() else "Triton kernels"
    text = (
        f"tpfuse computes with {name if kernels == 'triton' else kernels}, which --kernels {chosen} means on {where}."
    )
    found = [Finding(_USE, "ok", text)]
    if len(gpus) == 1:
        return [*found, Finding(_USE, "ok", "One rank runs on the one GPU, so nothing is communicated.")]
    obstacle = machine.obstacle(gpus)
    backend = CudaMemory.backend if gpus else SharedMemory.backend
    if obstacle:
        found.append(Finding(_USE, "note", f"Ranks have no symmetric memory: {obstacle}."))
    else:
        found.append(Finding(_USE, "ok", f"Ranks have symmetric memory with the backend {backend}."))
    choice = decide(device, torch.float32, chosen_implementation(), chosen, obstacle)
    text = f"Tensor-parallel products use {choice.implementation} ({choice.reason})"
    if gpus and choice.provisional:
        count = machine.decisions()
        text += f", except for {count} cases that earlier runs have measured" if count else ""
        text += ". `tpfuse train` measures the others in its first step"
    return [*found, Finding(_USE, "note" if choice.fallback else "ok", f"{text}.")]


def verdict(findings: list[Finding]) -> str:
    """Returns the last line of the report."""
    fails, notes = (sum(finding.status == status for finding in findings) for status in ("fails", "note"))
    rest = f"{notes} note{'s' * (notes != 1)}"
    return (
        f"{fails} finding{'s' * (fails != 1)} will make something fail, {rest}" if fails else f"nothing fails, {rest}"
    )


def run(as_json: bool, machine: Machine | None = None) -> int:
    """Runs the command. Returns 1 if something will fail, else 0."""
    findings = examine(Machine() if machine is None else machine)
    failed = any(finding.status == "fails" for finding in findings)
    if as_json:
        say(json.dumps({"passed": not failed, "findings": [asdict(finding) for finding in findings]}))
        return int(failed)
    for topic, group in groupby(findings, lambda finding: finding.topic):
        say(topic)
        for finding in group:
            say(f"  {finding.status:<6} {finding.text}")
    say(f"\n{verdict(findings)}")
    return int(failed)
