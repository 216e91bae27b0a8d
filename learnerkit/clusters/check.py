"""Refuse a place that other variables, or the GPUs of the machine, contradict."""

from collections.abc import Mapping

from learnerkit.clusters.place import ENVIRONMENT, Place, integer

SETTLE = "give --nnodes, --node-rank and --master-addr; --nnodes 1 runs on this machine alone (errors.html#clusters)"


def check_launcher(place: Place, environ: Mapping[str, str], gpus: int, nproc: int | None = None) -> None:
    """Refuse a place in which a launcher cannot know what to start.

    Args:
        place: the place of the launcher.
        environ: its environment.
        gpus: how many GPUs can be used on this machine.
        nproc: how many ranks the user wants here; `None`: not said.

    Raises:
        ValueError: says what contradicts what, and the option that settles it.
    """
    if place.launched and place.nodes > 1:
        raise ValueError(
            f"{place}, so this process is a rank already, which a launcher started; run the script itself here, or "
            "--nnodes 1 starts another run (errors.html#clusters)"
        )
    found = f"{gpus} GPU{'s' * (gpus != 1)}"
    size = f"WORLD_SIZE={place.nodes}, {found}"
    if "NPROC_PER_NODE" in environ:
        size += f", NPROC_PER_NODE={environ['NPROC_PER_NODE']}"
    if _is_unsure(place) and max(gpus, place.nproc or 1) > 1 and nproc is None:
        raise ValueError(
            f"{size}: does WORLD_SIZE count ranks or nodes? If it counts nodes, give --nproc, or --nnodes "
            f"{place.nodes} --node-rank {place.node} --master-addr {place.address}; if it counts ranks, give the true "
            "numbers of nodes; --nnodes 1 runs on this machine alone (errors.html#clusters)"
        )
    if 0 < gpus < (place.nproc or 0) and nproc is None:
        raise ValueError(
            f"{place} and {place.nproc} processes on each, but {found} can be used here; give --nproc "
            "(errors.html#clusters)"
        )
    _check_numbers(place, environ, place.nproc or max(gpus, 1), SETTLE)


def check_script(place: Place, environ: Mapping[str, str], gpus: int) -> None:
    """Refuse a place in which a process that no launcher has started cannot be one rank.

    Args:
        place: the place of the process.
        environ: its environment.
        gpus: how many GPUs it sees.

    Raises:
        ValueError: says what contradicts what, and to use the launcher.
    """
    settle = "start the script with `python -m learnerkit.launch`, which starts all ranks of a machine, or unset the "
    settle += "variables (errors.html#clusters)"
    per_node = place.nproc or max(gpus, 1)
    if not place.is_rank and place.nodes > 1 and (per_node > 1 or place.least is not None):
        question = ": does WORLD_SIZE count ranks or nodes?" if _is_unsure(place) else ""
        raise ValueError(
            f"{place}, so one process was started here, where {per_node} ranks belong (GPUs: {gpus}){question}; "
            f"{settle}"
        )
    _check_numbers(place, environ, per_node, settle)


def _is_unsure(place: Place) -> bool:
    """Tell whether nothing says if the place is one of ranks or one of nodes."""
    return place.cluster == ENVIRONMENT and not place.launched and place.nodes > 1


def _check_numbers(place: Place, environ: Mapping[str, str], per_node: int, settle: str) -> None:
    """Compare the place with RANK and WORLD_SIZE, which may count ranks (PyTorchJob since 2023) or nodes (before)."""
    if place.least is not None or not place.cluster:
        return
    rank, size = integer(environ, "RANK", place.node), integer(environ, "WORLD_SIZE", place.nodes)
    if rank != place.node or size not in (place.nodes, place.nodes * per_node):
        raise ValueError(f"{place}, but RANK={rank} and WORLD_SIZE={size}; {settle}")
