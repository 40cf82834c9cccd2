"""How far searches go. Bounds count tries rather than seconds, so that every machine finds the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """The bounds, one for each loop of a search.

    Args:
        drafts: that `init` runs for one model. A run takes about a tenth of a second, so that the longest search ends in minutes.
        packings: of the matrices of one group, which are combined: each matrix has one to three.
        packings_of_states: the same for a layer with a state, whose norms and convolutions have choices too.
        choices_of_states: of which several may give the same packing.
        packings_of_matrix: of one matrix of such a layer, the most likely first.
        removed: numbers of such a layer that are equal to a divided number by chance, and are left whole one after the other.
        expressions: for the length of one part: products of the model's numbers, the most likely first.
        expressions_together: for all parts of a matrix, which must add up to its rows.
        divided: numbers that one group's code needs divided; each is found by running all that are left.
        around_list: modules around a list of blocks that may return the blocks' output.
        overlay_errors: of a candidate for sequence parallelism; one with more is wrong itself.
        overlays_fixed: candidates that are repaired, those with the fewest errors.
        overlay_whole: parts of a block that leave the split sequence.
        repair_rounds: of a draft; each may reveal what the last one's errors had hidden.
        repairs: changes that are tried for one finding.
        repairs_after_one: further changes after one that fixes the finding and leaves others.
        repairs_of_plan: changes that are tried for all findings of a plan, over all its variants and kinds of input.
        repair_seconds: of processor time for those, where a model is so slow that the count would be minutes.
        help_drafts: that the solver runs for the helps of one model, over all its plans; a group of matrices takes 2 to 30.
        help_seconds: of processor time for those.
        drawing_places: in the code that are drawn anew, to see whether they change the result; others are reported untried.
        numbers_compared: with ids of tokens by the code of one line, which the ids of one rank become.
        aligned: operations of one call that are compared with another run's: the time is quadratic.
        compared: elements that are compared pair by pair to find the slices that a value consists of.
        roots: values of other stages that one value comes from; a message names no more.
        heads_times: the usual number of heads of a reduced model, where a plan needs more.
        routing_seeds: until every expert of a reduced model has a token.
        branches: how often a branch is looked for inside another one.
    """

    drafts: int = 1000
    packings: int = 16
    packings_of_states: int = 24
    choices_of_states: int = 200
    packings_of_matrix: int = 3
    removed: int = 3
    expressions: int = 6
    expressions_together: int = 4000
    divided: int = 5
    around_list: int = 2
    overlay_errors: int = 4
    overlays_fixed: int = 4
    overlay_whole: int = 4
    repair_rounds: int = 6
    repairs: int = 40
    repairs_after_one: int = 4
    repairs_of_plan: int = 120
    repair_seconds: float = 10.0
    help_drafts: int = 120
    help_seconds: float = 5.0
    drawing_places: int = 8
    numbers_compared: int = 8
    aligned: int = 2000
    compared: int = 2**24
    roots: int = 8
    heads_times: int = 4
    routing_seeds: int = 4
    branches: int = 4


BOUNDS: Final = SearchBounds()
