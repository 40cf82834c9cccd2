"""Pipeline schedules: the records agree with torch's classes, and every table of actions can run."""

import itertools
from collections import Counter

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from shardplan.core.schedules import SCHEDULES, Action, schedule_of
from shardplan.torchlib.schedule_actions import actions_of

SIZES = [(pp, m, v) for pp in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 6, 8, 9, 12) for v in (None, 1, 2, 3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_has_every_action_once_in_an_order_that_runs(name):
    schedule, ran = SCHEDULES[name], 0
    for pp, m, v in SIZES:
        if schedule.misfit(pp, m, v) is not None:
            with pytest.raises(ValueError):
                actions_of(schedule, pp, m, v)
            continue
        ran += 1
        table = actions_of(schedule, pp, m, v)
        stages = pp * (v or schedule.stages_per_rank)
        kinds = Counter((a.stage, a.micro_batch, a.kind) for row in table for a in row)
        assert set(kinds.values()) == {1}
        for stage, i in itertools.product(range(stages), range(m)):
            found = {kind for s, j, kind in kinds if (s, j) == (stage, i)}
            assert found in ({"forward", "backward"}, {"forward", "backward of inputs", "backward of weights"})
        assert all(schedule.rank_of(a.stage, pp) == rank for rank, row in enumerate(table) for a in row)
        assert schedule.splits_backward or not any("of" in a.kind for row in table for a in row)
        assert runs(table, stages) == sum(map(len, table))
    assert ran


def runs(table, stages):
    """How many actions run before every rank waits for another one."""
    done, at, moved = set(), [0] * len(table), True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            while at[rank] < len(row) and needs(row[at[rank]], stages) <= done:
                action = row[at[rank]]
                done.add((action.kind[:1], action.stage, action.micro_batch))
                at[rank] += 1
                moved = True
    return sum(at)


def needs(action, stages):
    """Forward: the stage before. Backward: the own forward and the stage after. Weights: the own input's gradient."""
    s, i = action.stage, action.micro_batch
    if action.kind == "forward":
        return {("f", s - 1, i)} if s else set()
    own = {("f", s, i)} if action.kind != "backward of weights" else {("b", s, i)}
    return own | ({("b", s + 1, i)} if s < stages - 1 and action.kind != "backward of weights" else set())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_records_are_what_torch_has(name):
    schedule = SCHEDULES[name]
    cls = torch_schedules.get_schedule_class(schedule.torch_class)
    assert issubclass(cls, torch_schedules.PipelineScheduleMulti) == schedule.multiple
    for pp in (2, 4):
        mapping = generate_stage_to_rank_mapping(pp, pp * schedule.stages_per_rank, style=schedule.order)
        assert mapping == {s: schedule.rank_of(s, pp) for s in range(pp * schedule.stages_per_rank)}
    assert schedule_of(schedule.torch_class) is schedule_of(name.upper().replace("_", "-")) is schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_torch_refuses_is_a_misfit(name, monkeypatch):
    """Torch is asked without our question before; what else it cannot run, it must not accept without a word."""
    schedule = SCHEDULES[name]
    for pp, m, v in SIZES:
        misfit = schedule.misfit(pp, m, v)
        with monkeypatch.context() as patch:
            patch.setattr(type(schedule), "misfit", lambda *args: None)
            try:
                table = actions_of(schedule, pp, m, v)
            except ValueError as error:
                assert misfit is not None, (pp, m, v, error)
                continue
        if misfit is not None and name != "1f1b" and "on each rank" not in misfit:
            pytest.fail(f"{(pp, m, v)}: {misfit}, but torch runs {table}")


def test_the_order_of_1f1b():
    table = actions_of(SCHEDULES["1f1b"], 2, 3)
    assert ["".join((a.kind[0], str(a.micro_batch))) for a in table[0]] == ["f0", "f1", "b0", "f2", "b1", "b2"]
    assert ["".join((a.kind[0], str(a.micro_batch))) for a in table[1]] == ["f0", "b0", "f1", "b1", "f2", "b2"]
    assert table[1][0] == Action("forward", 1, 0)


@pytest.mark.skipif(torch.__version__.split("+")[0] >= "2.14", reason="torch may have mended it")
def test_torch_s_own_table_of_1f1b_is_off_by_one_on_the_last_rank():
    """Why `actions_of` has a table of its own: remove it when this fails."""
    from types import SimpleNamespace

    stage = SimpleNamespace(
        group_size=2, num_stages=2, stage_index=0, submod=torch.nn.Identity(), is_first=True, is_last=False
    )
    made = torch_schedules.Schedule1F1B(stage, n_microbatches=3, loss_fn=lambda out, to: out)
    assert next(str(a) for a in made.pipeline_order[1] if a is not None) == "1F1"


def test_words_that_name_no_schedule():
    with pytest.raises(ValueError, match="did you mean interleaved"):
        schedule_of("interleave")
    with pytest.raises(ValueError, match="the schedules are gpipe, 1f1b"):
        schedule_of("x")
    with pytest.raises(TypeError):
        schedule_of(None)


def test_why_a_schedule_cannot_run():
    assert SCHEDULES["1f1b"].misfit(4, 3) == "1f1b needs a micro-batch for each of its 4 stages, there are 3"
    assert SCHEDULES["zbv"].misfit(4, 8, 1) == "zbv has 2 stages on each rank, not 1"
    assert SCHEDULES["interleaved"].misfit(2, 5) == (
        "interleaved runs micro-batches in rounds of at least pp = 2: 5 of them are not 2 rounds of one size"
    )
    assert SCHEDULES["gpipe"].misfit(4, 1) is None
