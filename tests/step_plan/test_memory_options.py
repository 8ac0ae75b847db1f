"""The table of memory options: its rows fit settings and plan, and say what forbids them."""

from dataclasses import fields, replace

import pytest

from tests.support.preflight_examples import setup
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.memory_options import (
    LEVELS,
    TABLE,
    Circumstances,
    MemoryOptions,
    in_words,
)
from workflow.lib.system.errors import UserError

GPUS = Circumstances(
    cuda=True, processes=2, num_layers=32, tied_embeddings=False, embedding="m.embed"
)
CPUS = GPUS._replace(cuda=False)
ONE = GPUS._replace(processes=1)
ROWS = {option.field: option for option in TABLE}


@pytest.mark.parametrize("option", TABLE, ids=lambda option: option.field)
def test_row_has_a_field_of_the_plan_and_a_setting_of_its_type(option):
    assert option.field in {field.name for field in fields(MemoryOptions)}
    section, _, name = option.setting.partition(".")
    default = getattr(getattr(RunConfig(), section), name)
    settled = option.settled(default, setup(), GPUS)
    assert type(settled) is type(option.off) or isinstance(settled, type(option.most))


def test_every_option_of_a_plan_has_a_row():
    own = {field.name for field in fields(MemoryOptions)} - {
        f.name for f in fields(MemoryOptions.__base__)
    }
    assert own == {*ROWS, "offload_window_bytes"}


@pytest.mark.parametrize(
    ("wanted", "where", "offloaded"),
    [("auto", GPUS, True), ("auto", ONE, False), ("auto", CPUS, False), (True, ONE, True)],
    ids=["several GPUs", "one GPU", "CPUs", "asked for"],
)
def test_embedding_is_on_the_host_where_it_spares_a_gpu(wanted, where, offloaded):
    assert ROWS["offload_embedding"].settled(wanted, setup(), where) is offloaded


def test_tiles_are_tried_for_long_rows_of_models_that_have_such_modules():
    tiles, long = ROWS["tile_tokens"], GPUS._replace(seq_len=16_384, tileable=True)
    assert tiles.open_values("auto", long) == (0, 8192)
    for where in (long._replace(seq_len=16_383), long._replace(tileable=False)):
        assert tiles.open_values("auto", where) == ()
    assert tiles.settled(512, setup(), long) == 512
    with pytest.raises(UserError, match=r"hardware\.tile_tokens = 512: .*train\.fused_layers"):
        tiles.settled(512, setup(), long._replace(tileable=False))


def test_attention_is_kept_in_recomputed_layers_of_long_rows_where_its_results_are_known():
    kept, long = ROWS["keep_attention"], GPUS._replace(seq_len=16_384)
    assert kept.open_values("auto", long) == (False, True)
    assert kept.open_values("auto", GPUS) == ()
    assert kept.settled(True, setup(), long) is True
    with pytest.raises(UserError, match=r"train\.keep_attention = true: model\.attention is flex"):
        kept.settled(True, setup(attention="flex"), long)
    plan = setup(keep_attention=True)
    assert not kept.needless(plan)
    for changes in ({"activation_checkpointing": False}, {"attention": "flex"}):
        assert kept.needless(replace(plan, **changes))
    assert in_words(plan, 36)["recomputation"] == "all 36 layers, without attention"


def test_weights_stay_decoded_in_all_layers_if_the_model_has_fewer():
    plan = setup(keep_decoded=40, activation_checkpointing=False)
    assert [*plan.layers(36).decoded] == [*range(36)]
    assert in_words(plan, 36)["recomputation"] == "no layers, weights of all 36 layers kept decoded"
    decoded = ROWS["keep_decoded"]
    assert not decoded.needless(plan)
    for changes in ({"activation_checkpointing": 2}, {"offload_layers": 1}, {"kept": (".+",)}):
        assert decoded.needless(replace(plan, **changes))
    assert not decoded.needless(replace(plan, kept=(".+",), matmul_dtype="float8"))


def test_option_that_another_forbids_names_both_settings():
    trained = setup(trains_embedding=True)
    with pytest.raises(UserError, match=r"offload_embedding = true: lora\.modules_to_save"):
        ROWS["offload_embedding"].settled(True, trained, GPUS)
    graphs = setup(cuda_graphs=True)
    for change, setting in (
        ({"nodes": 2}, "hardware.nodes = 2"),
        ({"attention": "eager"}, "model.attention = eager"),
    ):
        assert str(replace(graphs, **change).graph_obstacle).startswith(setting)


@pytest.mark.parametrize("field", ["cuda_graphs", "fused_loss"])
def test_option_that_is_on_by_default_is_left_out_on_cpus(field):
    assert ROWS[field].settled(True, setup(), CPUS) is False
    assert ROWS[field].settled(True, setup(), GPUS) is True


@pytest.mark.parametrize(
    ("wanted", "levels"), [(True, ()), (False, ()), (3, ()), ("auto", [*LEVELS])]
)
def test_recomputation_that_is_set_is_not_searched(wanted, levels):
    assert ROWS["activation_checkpointing"].open_values(wanted, GPUS) == levels


@pytest.mark.parametrize(
    ("num_layers", "shares"),
    [(1, []), (2, []), (3, [0.625]), (4, [0.625, 0.75]), (6, [0.625, 0.75])],
)
def test_auto_tries_no_share_that_takes_the_layers_of_a_simpler_level(num_layers, shares):
    where = GPUS._replace(num_layers=num_layers)
    levels = ROWS["activation_checkpointing"].open_values("auto", where)
    assert [level for level in levels if isinstance(level, float)] == shares
    assert [level for level in levels if not isinstance(level, float)] == [False, 8, 4, 3, 2, True]


def test_plan_is_said_in_words():
    plan = setup(activation_checkpointing=0.625, offload_activations=4, offload_layers=3)
    assert in_words(plan, 36) == {
        "recomputation": "23 of 36 layers",
        "gathered weights": "freed after forward",
        "offloaded to host memory": "activations of 4 of 36 layers, weights of 3 of 36 layers",
    }
    tiled = in_words(replace(plan, tile_tokens=8192), 36)
    assert tiled["recomputation"] == "23 of 36 layers, feed-forwards in tiles of 8,192 tokens"
    alone = in_words(replace(plan, processes=1, activation_checkpointing=8), 36)
    assert alone["recomputation"] == "5 of 36 layers"
    assert "gathered weights" not in alone
