"""Tables of machines with prices."""

import re
from pathlib import Path

import pytest

from tests.support.decisions import decided, llama_8b, run_config
from tests.support.preflight_examples import machine, token_counts
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.machine_table import Answer, MachineTable, Offer, machine_table
from workflow.lib.system.errors import UserError


def written(folder, text):
    file = folder / "machines.yaml"
    file.write_text(text)
    return str(file)


def test_shipped_example_is_read():
    file = Path(__file__).parents[3] / "workflow" / "resources" / "machines.yaml"
    table = machine_table(str(file), setting="--cheapest")
    assert table.machines[-1].label == "2 nodes of 8xH100"


def test_list_of_gpus_is_a_table_without_prices():
    table = machine_table("2x4090,A100 40GB", setting="--compare")
    assert [offer.gpus for offer in table.machines] == ["2x4090", "A100 40GB"]
    assert {offer.price_per_hour for offer in table.machines} == {0.0}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "there is no list of machines"),
        ("machines: []", "machines = []: must have at least 1 entry"),
        ("machines: {gpus: 4090}", "there is no list of machines"),
        ("machines: [4090]", "machines.1 = 4090: must have keys"),
        ("machines: [{gpus: 2x4090}, {gpus: 2x4091}]", "machines.2.gpus = '2x4091': no GPU"),
        ("machines: [{price_per_hour: 1}]", "machines.1.gpus: must be given"),
        (
            "machines: [{gpus: 4090, price_per_hour: -1}]",
            "machines.1.price_per_hour = -1: must be at least 0",
        ),
        ("machines: [{gpus: A100, price: 1}]", "machines.1.price: there is no such key. Did you"),
        ("machines: [{gpus: A100, watts: .nan}]", "machines.1.watts = nan: must be"),
        ("machines: [{gpus: A100}]\nprice_per_kwh: -0.1", "price_per_kwh = -0.1: must be at least"),
        (
            "machines: [{gpus: A100",
            "line 1: expected ',' or '}', but got '<stream end>': this is no",
        ),
        ("machines: [{gpus: A100, watts: 010}]", "line 1: YAML reads 010 as 8. Write 8, or put"),
        ("machines: []\nmachines: []", "line 2: the key machines stands there for the second"),
    ],
)
def test_mistake_in_a_table_is_one_message_that_names_file_and_place(tmp_path, text, part):
    file = written(tmp_path, text)
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        machine_table(file, setting="--cheapest")
    assert str(caught.value).startswith(file)
    assert "config.yaml" not in str(caught.value)


@pytest.mark.parametrize("text", ["2x4090,,H100", "", "nowhere/machines.yaml", "8xH900"])
def test_text_that_is_no_table_is_refused(text):
    with pytest.raises(UserError):
        machine_table(text, setting="--compare")


def answers(*told):
    """Answers of machines by hours and cost; None: it does not fit."""
    offer = Offer(gpus="4090")
    return [
        Answer(offer, None, "too much") if one is None else Answer(offer, None, None, *one)
        for one in told
    ]


@pytest.mark.parametrize(("hours", "place"), [(None, 1), (100.0, 1), (20.0, 2), (8.0, 3)], ids=str)
def test_cheapest_is_the_one_of_least_cost_that_is_done_by_then(hours, place):
    told = answers(None, (50.0, 5.0), (12.0, 9.0), (3.0, 30.0), (60.0, 6.0))
    assert MachineTable(machines=[Offer(gpus="4090")]).cheapest(told, hours=hours) is told[place]


@pytest.mark.parametrize(
    ("told", "hours", "part"),
    [
        ([None], None, "fits none of the machines"),
        ([(5.0, 0.0)], None, "no machine that fits has a price"),
        ([(5.0, 1.0), (4.0, 2.0)], 3.0, "the fastest machine, 4090, takes 4 h"),
    ],
)
def test_no_cheapest_machine_is_told_with_the_reason(told, hours, part):
    table = MachineTable(machines=[Offer(gpus="4090")])
    with pytest.raises(UserError, match=part):
        table.cheapest(answers(*told), hours=hours)


def test_cost_is_of_all_nodes_and_of_their_electricity():
    on, run = machine(), run_config()
    decision = decided(on=on)
    found = forecast(decision, run, llama_8b, on, token_counts(seq_len=2048))
    offer = Offer(gpus="2x4090", nodes=3, price_per_hour=2.0, watts=500.0)
    answer = MachineTable(machines=[offer], price_per_kwh=0.4).answer(
        offer, lambda: (decision, found)
    )
    assert answer.fits
    assert answer.hours == found.time.total_h
    assert answer.cost == pytest.approx(answer.hours * 3 * (2.0 + 0.5 * 0.4))


def test_settings_that_cannot_work_on_a_machine_are_its_answer():
    def refused():
        raise UserError("train.global_batch_size = 3: must be a multiple")

    offer = Offer(gpus="2x4090")
    answer = MachineTable(machines=[offer]).answer(offer, refused)
    assert (answer.fits, answer.lack) == (False, "train.global_batch_size = 3: must be a multiple")
