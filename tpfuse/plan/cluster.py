"""The GPUs, links and network that `tpfuse plan` plans for, and where their numbers come from."""

from pathlib import Path

from tpfuse.cost.hardware import FOLDER, Cluster, check_link, load_gpu, load_link, parse_network
from tpfuse.train.config import read_toml
from tpfuse.train.errors import UserError
from tpfuse.train.options import PlanCommand

PER_NODE = 8  # GPUs of a node by default


def planned_cluster(command: PlanCommand) -> Cluster:
    """Returns the GPUs that the command describes. Raises UserError."""
    for flag, value, least in (("gpus", command.gpus, 1), ("nodes", command.nodes, 0)):
        if value < least:
            raise UserError(f"--{flag} {value}: expected at least {least}")
    nodes = command.nodes or -(-command.gpus // PER_NODE)
    if command.gpus % nodes or (not command.nodes and nodes > 1 and command.gpus % PER_NODE):
        shares = f"--nodes {nodes}" if command.nodes else f"nodes of {PER_NODE}"
        raise UserError(f"--gpus {command.gpus} cannot be divided equally among {shares}: give --nodes that divide it")
    try:
        gpu = load_gpu(command.gpu)
        links = _links(command, gpu.links)
        link, network = load_link(links), parse_network(command.network)
        check_link(gpu, link)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
    return Cluster(gpu, command.gpus, command.gpus // nodes, link, network)


def _links(command: PlanCommand, known: tuple[str, ...]) -> str:
    """Returns the name of the links, or the file that describes them. known: the links that the GPU can have."""
    if command.links or known:
        return command.links or known[0]
    if "link" in read_toml(_file("gpus", command.gpu)):
        return command.gpu
    raise UserError(f"--gpu {command.gpu} does not say which links it has: give --links")


def sources_of(command: PlanCommand, cluster: Cluster) -> dict[str, str]:
    """Returns where the numbers of the GPU, of its links and of the network come from, by the number."""
    files = [_file("gpus", command.gpu), _file("links", _links(command, cluster.gpu.links))]
    if cluster.gpus > cluster.per_node:
        kind = "ethernet" if command.network.strip().endswith("E") else "infiniband"
        files.append(FOLDER / "networks" / f"{kind}.toml")
    sources: dict[str, str] = {}
    for file in files:
        tables = read_toml(file)
        tables |= {f"link {name}": entry for name, entry in tables.pop("link", {}).items()}
        sources |= {f"{file.stem} {name}": str(entry["source"]) for name, entry in tables.items()}
    return sources


def _file(folder: str, name: str) -> Path:
    known = FOLDER / folder / f"{name}.toml"
    return known if known.is_file() else Path(name)
