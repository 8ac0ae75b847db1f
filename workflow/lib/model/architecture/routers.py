"""Paths of a mixture's routers, and the coefficient of their load balance.

A router is the module beside the experts of a layer that has one matrix, with a row per expert. No
family is named here. Imports no torch, so preflight and training find the same."""

from collections.abc import Iterator, Mapping

from workflow.lib.system.errors import setting_error

CORRECTION = "correction_bias"
"""Suffix of tensors that a family's training changes by the experts' loads, without gradient."""


def router_paths(
    experts: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return the path of each router by the path of its experts. experts: their number, by path;
    shapes: of all unpacked parameters."""
    rows_by_path = {}
    for path, count in experts.items():
        for beside, rows in _rows_of_matrices(path, shapes):
            if rows == [count]:
                rows_by_path[path] = beside
    return rows_by_path


def _rows_of_matrices(
    experts: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, list[int]]]:
    """Yield path and row counts of the matrices of each module beside `experts`."""
    parent, _, own = experts.rpartition(".")
    before = f"{parent}." if parent else ""
    rows: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        child, inside, _ = name.removeprefix(before).partition(".")
        if not name.startswith(before) or not inside or child == own:
            continue
        if len(shape) > 1 and not name.endswith(CORRECTION):
            rows.setdefault(f"{before}{child}", []).append(shape[0])
    yield from rows.items()


def balance_coefficient(
    configured: float | None, family: float | None, *, routers_trained: bool, name: str
) -> float:
    """Return the coefficient of the load-balancing loss; 0: it is not computed. configured:
    `train.router_aux_loss_coef`; family: config.json's value, None for a family without such a
    loss; name: of the family, for messages. Raises `UserError` if such a family is asked for it."""
    if configured and family is None:
        raise setting_error(
            "train.router_aux_loss_coef",
            configured,
            f"models of the type {name} have no load-balancing loss of the router in Transformers",
            "Set it to null or 0, or choose another model.source",
        )
    if configured is not None:
        return configured
    return family or 0.0 if routers_trained else 0.0
