"""Where routers are, by shapes alone, and whether their load is balanced."""

import pytest

from workflow.lib.model.architecture.routers import balance_coefficient, router_paths
from workflow.lib.system.errors import UserError

SHAPES = {
    "layers.0.mlp.gate.weight": (4, 16),
    "layers.0.mlp.gate.bias": (4,),
    "layers.0.mlp.shared_expert_gate.weight": (1, 16),
    "layers.0.mlp.shared.up_proj.weight": (4, 16),
    "layers.0.mlp.shared.down_proj.weight": (16, 4),
    "layers.0.mlp.experts.gate_up_proj": (4, 8, 16),
    "layers.1.router.layer.weight": (4, 16),
    "layers.1.router.layer.correction_bias": (1, 4),
}


def test_router_is_the_module_beside_with_one_matrix_of_a_row_an_expert():
    experts = {"layers.0.mlp.experts": 4, "layers.1.experts": 4}
    found = {"layers.0.mlp.experts": "layers.0.mlp.gate", "layers.1.experts": "layers.1.router"}
    assert router_paths(experts, SHAPES) == found


def test_experts_of_another_number_have_no_router():
    assert router_paths({"layers.0.mlp.experts": 5}, SHAPES) == {}


def test_experts_at_the_top_have_theirs_beside_them():
    assert router_paths({"experts": 3}, {"gate.weight": (3, 8)}) == {"experts": "gate"}


@pytest.mark.parametrize(
    ("asked", "family", "trained", "coefficient"),
    [
        (None, 0.02, True, 0.02),
        (None, 0.02, False, 0.0),
        (None, None, True, 0.0),
        (0.5, 0.02, False, 0.5),
        (0.0, 0.02, True, 0.0),
        (0.0, None, True, 0.0),
    ],
)
def test_null_takes_the_familys_coefficient_where_routers_are_trained(
    asked, family, trained, coefficient
):
    found = balance_coefficient(asked, family, routers_trained=trained, name="mixtral")
    assert found == coefficient


def test_balance_that_a_family_has_not_is_refused_by_name():
    with pytest.raises(UserError, match=r"_coef = 0\.1: models of the type glm4_moe"):
        balance_coefficient(0.1, None, routers_trained=True, name="glm4_moe")
