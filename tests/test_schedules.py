"""Pipeline schedules: the records agree with torch's classes, and the closed forms of estimates with torch's tables of actions."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from shardplan.core.schedules import SCHEDULES, schedule_of
from shardplan.cost.pipeline_time import StageBytes, ahead, fullest, step_seconds

SIZES = [(pp, m, v) for pp in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 6, 8, 9, 12) for v in (None, 1, 2, 3)]


def actions(schedule, pp, micro_batches, stages_per_rank=None):
    """Of each rank what it does, in order: (whether a forward, stage, micro-batch)."""
    count = stages_per_rank or schedule.stages_per_rank
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=pp * count,
            stage_index=stage,
            submod=torch.nn.Identity(),
            is_first=stage == 0,
            is_last=stage == pp * count - 1,
        )
        for stage in range(0, pp * count, pp)
    ]
    make = torch_schedules.get_schedule_class(schedule.torch_class)
    made = make(stages if schedule.multiple else stages[0], n_microbatches=micro_batches, loss_fn=lambda out, to: out)
    kinds = {"F": True, "B": False}
    return [
        [
            (kinds[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in made.pipeline_order[rank]
            if a is not None and a.computation_type.value in kinds
        ]
        for rank in range(pp)
    ]


def played(table, stages):
    """Seconds of a table, where a forward takes 1 and a backward 2."""
    done, at, clocks = {}, [0] * len(table), [0] * len(table)
    for _ in range(sum(map(len, table))):  # one action runs in each turn, or the table waits for itself
        for rank, row in enumerate(table):
            while at[rank] < len(row):
                forward, s, i = row[at[rank]]
                needs = [(True, s - 1, i)] * (s > 0) if forward else [(True, s, i), (False, s + 1, i)][: stages - s]
                if any(need not in done for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)]) + (1 if forward else 2)
                done[forward, s, i] = clocks[rank]
                at[rank] += 1
    assert at == [*map(len, table)]
    return max(clocks)


def most_in_flight(row):
    here = most = 0
    for forward, _, _ in row:
        here += 1 if forward else -1
        most = max(most, here)
    return most


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_the_closed_forms_are_those_of_torch_s_tables(name):
    schedule, ran = SCHEDULES[name], 0
    for pp, m, v in SIZES:
        if schedule.misfit(pp, m, v) is not None:
            continue
        ran += 1
        count = v or schedule.stages_per_rank
        table = actions(schedule, pp, m, v)
        assert all(stage % pp == rank for rank, row in enumerate(table) for _, stage, _ in row)
        assert [ahead(schedule, pp, m, rank, count) for rank in range(pp)] == [*map(most_in_flight, table)]
        assert step_seconds([3.0 * count] * pp, m, count) == pytest.approx(played(table, pp * count)), (pp, m, v)
        kept = [StageBytes(1 + stage, 5) for stage in range(pp * count)]
        assert [fullness(fullest(schedule, pp, m, rank, kept), kept) for rank in range(pp)] == [
            fullest_of(row, kept) for row in table
        ]
    assert ran > 20


def fullness(moment, kept):
    return sum(kept[s].kept * n for s, n in moment.in_flight.items()) + sum(kept[s].gradients for s in moment.trained)


def fullest_of(row, kept):
    live, trained, most = dict.fromkeys(range(len(kept)), 0), set(), 0
    for forward, stage, _ in row:
        live[stage] += 1 if forward else -1
        trained |= set() if forward else {stage}
        most = max(most, sum(kept[s].kept * n for s, n in live.items()) + sum(kept[s].gradients for s in trained))
    return most


@pytest.mark.parametrize("m", [8, 16])
def test_bubbles_are_those_of_the_papers(m):
    """GPipe and 1F1B: (p - 1) / m of the work; interleaved with v stages: (p - 1) / (v m)."""
    for v in (1, 2, 3):
        assert step_seconds([3.0 * v] * 4, m, v) == pytest.approx(3 * v * m * (1 + 3 / (v * m)))
    assert step_seconds([3.0, 3.0, 3.0, 5.0], m, 1) == m * 5 + 9  # the others' stages, before and after its own
    assert step_seconds([3.0, 3.0], m, 1, hand_over=0.5) == 3 * m + 3 + 1


def test_activations_in_flight():
    def of(name, pp, m, kept=1, gradients=0):
        schedule = SCHEDULES[name]
        stages = [StageBytes(kept, gradients)] * (pp * schedule.stages_per_rank)
        return [fullest(schedule, pp, m, rank, stages) for rank in range(pp)]

    assert [one.in_flight for one in of("gpipe", 4, 8)] == [{0: 8}, {1: 8}, {2: 8}, {3: 8}]
    assert [one.in_flight for one in of("1f1b", 4, 8)] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    assert [sum(one.in_flight.values()) for one in of("interleaved", 4, 8)] == [11, 9, 7, 5]
    # Gradients are there from the first backward on. GPipe has all activations before it: whichever is more counts.
    few, many = of("gpipe", 4, 8, kept=3, gradients=2), of("gpipe", 4, 8, kept=2, gradients=3)
    assert few[0].in_flight == {0: 8} and few[0].trained == frozenset()
    assert many[0].in_flight == {0: 7} and many[0].trained == {0}
    later, alone = of("1f1b", 4, 8, kept=3, gradients=2)[0], of("1f1b", 4, 4, kept=3, gradients=2)[0]
    assert later.in_flight == {0: 4} and later.trained == {0}
    assert alone.in_flight == {0: 4} and alone.trained == frozenset()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_records_are_what_torch_has(name):
    schedule = SCHEDULES[name]
    cls = torch_schedules.get_schedule_class(schedule.torch_class)
    assert issubclass(cls, torch_schedules.PipelineScheduleMulti) == schedule.multiple
    for pp in (2, 4):
        stages = pp * schedule.stages_per_rank
        assert generate_stage_to_rank_mapping(pp, stages, style="loop") == {s: s % pp for s in range(stages)}
    assert schedule_of(schedule.torch_class) is schedule_of(name.upper().replace("_", "-")) is schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_torch_refuses_is_a_misfit(name):
    """What else it cannot run, torch must not accept without a word."""
    schedule = SCHEDULES[name]
    for pp, m, v in SIZES:
        misfit = schedule.misfit(pp, m, v)
        try:
            actions(schedule, pp, m, v)
        except ValueError as error:
            assert misfit is not None, (pp, m, v, error)
            continue
        assert misfit is None or name == "1f1b" or "on each rank" in misfit, (pp, m, v)


def test_words_that_name_no_schedule():
    with pytest.raises(ValueError, match="did you mean interleaved"):
        schedule_of("interleave")
    with pytest.raises(ValueError, match="the schedules are gpipe, 1f1b"):
        schedule_of("zbv")
    with pytest.raises(TypeError):
        schedule_of(None)


def test_why_a_schedule_cannot_run():
    assert SCHEDULES["1f1b"].misfit(4, 3) == "1f1b needs a micro-batch for each of its 4 stages, there are 3"
    assert SCHEDULES["gpipe"].misfit(4, 8, 2) == "gpipe has 1 stage on each rank, not 2"
    assert SCHEDULES["interleaved"].misfit(2, 5) == (
        "interleaved runs micro-batches in rounds of at least pp = 2: 5 of them are not 2 rounds of one size"
    )
    assert SCHEDULES["gpipe"].misfit(4, 1) is None
