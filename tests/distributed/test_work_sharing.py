import pytest

from tests.support.distributed import run_in_group
from workflow.lib.distributed.work_sharing import (
    Division,
    agreed,
    divide,
    fits,
    main_first,
    shared_out,
)
from workflow.lib.system.errors import UserError

GIB = 2**30


def squares(items):
    return [item * item for item in items]


def share(world, file):
    """One process's view: shared results of 7, 1 and 0 items, an agreed value, and the order in the
    block."""
    results = [shared_out(list(range(n)), squares, world=world) for n in (7, 1, 0)]
    with main_first(world), file.open("a") as log:
        log.write(f"{world.rank}\n")
    return results, agreed(f"of {world.rank}", world=world)


def test_shares_come_together_in_order_and_the_main_process_goes_first(tmp_path):
    found = run_in_group(share, tmp_path / "log", world_size=3)
    expected = [squares(range(7)), [0], []]
    assert found == [(expected, "of 0")] * 3
    assert (tmp_path / "log").read_text().startswith("0\n")


def fail_first(world, file):
    try:
        with main_first(world):
            if world.is_main:
                raise UserError("the cause")
            file.touch()
    except UserError as error:
        return str(error)
    return "went on"


def test_failure_of_the_main_process_stops_the_others_before_the_block(tmp_path):
    found = run_in_group(fail_first, tmp_path / "reached", world_size=2)
    assert found == ["the cause", "The main process failed; its message tells why."]
    assert not (tmp_path / "reached").exists()


@pytest.fixture
def model(tmp_path):
    """A folder whose weights are said to be 10 GiB: a sparse file."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * GIB)
    return tmp_path


@pytest.mark.parametrize(
    ("count", "gib", "expected"),
    [
        (0, 0, (1, False)),
        (1, 24, (1, False)),
        (1, 16, (1, False)),
        (4, 24, (4, False)),
        (4, 16, (4, True)),
    ],
)
def test_auto_is_a_process_a_gpu_sharded_only_if_the_model_does_not_fit_on_one(
    model, count, gib, expected
):
    gpus = [gib * GIB] * count
    assert divide("auto", shard="auto", folders=[model], gpu_bytes=gpus) == Division(*expected)


def test_model_larger_than_one_gpu_fills_them_from_one_process_where_sharding_is_off(model):
    gpus = [16 * GIB] * 4
    assert divide("auto", shard=False, folders=[model], gpu_bytes=gpus) == Division(1, False)
    assert divide(1, shard="auto", folders=[model], gpu_bytes=gpus) == Division(1, False)


def test_slices_may_take_more_of_a_gpu_than_copies(model):
    """As Llama 2 70B on two cards of 24 GB: there, no GPU is left to spread it over."""
    assert divide("auto", shard="auto", folders=[model], gpu_bytes=[7 * GIB] * 2) == Division(
        2, sharded=True
    )


def test_copies_that_do_not_fit_are_refused(model):
    with pytest.raises(
        UserError, match=r"evaluate\.processes = 2: 10\.0 GiB of weights leave room for 1 process"
    ):
        divide(2, shard=False, folders=[model], gpu_bytes=[16 * GIB] * 4)


@pytest.mark.parametrize(
    ("processes", "gib", "match"),
    [
        (1, 16, r"evaluate\.shard = true: one process has nobody"),
        ("auto", 2, r"evaluate\.processes = 4: a slice of 2\.5 GiB leaves a GPU of 2\.0 GiB too"),
        (5, 16, r"evaluate\.processes = 5: .* room for 4 process"),
    ],
)
def test_nothing_or_too_little_to_shard_over_is_refused(model, processes, gib, match):
    with pytest.raises(UserError, match=match):
        divide(processes, shard=True, folders=[model], gpu_bytes=[gib * GIB] * 4)


@pytest.mark.parametrize(
    ("division", "gpu_gib", "host_gib", "expected"),
    [
        (Division(2, sharded=False), [24, 24], 64, False),  # 16 GiB leave too little of 24
        (Division(2, sharded=False), [48, 48], 1, True),
        (Division(2, sharded=True), [24, 24], 1, True),
        (Division(2, sharded=True), [8, 8], 64, False),
        (Division(1, sharded=False), [], 64, True),  # 32 GiB in float32
        (Division(1, sharded=False), [], 48, False),
        (Division(2, sharded=False), [], 64, False),  # two copies
    ],
)
def test_original_is_loaded_where_the_others_leave_room(
    tmp_path, division, gpu_gib, host_gib, expected
):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * 2**30)
    found = fits(
        tmp_path, division, gpu_bytes=[g * 2**30 for g in gpu_gib], host_bytes=host_gib * 2**30
    )
    assert found is expected
