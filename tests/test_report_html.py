"""The page of `shardplan show --html`: well formed, complete, and no name of a model or a plan is markup in it."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from shardplan import Model, TrainingStep
from shardplan.api import plan_report
from shardplan.cli.main import main
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Report
from shardplan.report.html_parts import text
from shardplan.report.html_report import html_report
from tests.own_models import WIDTH, Stack, tokens

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
)
VOID = {"meta", "link", "line", "circle", "rect"}
HOSTILE = """<script>alert(1)</script>"'&<img src=x onerror=alert(1)>"""


class Page(HTMLParser):
    """Tags are closed in their order; which there are, and the text."""

    def __init__(self, content: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def shown(made) -> str:
    return html_report(
        made.plan, made.model, made.sizes, made.report, made.programs, made.estimates, made.flow, made.pipeline
    )


@pytest.fixture(scope="module")
def made():
    return plan_report(CONFIG, "llama", {"dp_shard": 2, "tp": 2}, TrainingStep(64), device="h100")


def test_everything_is_in_it(made):
    page = Page(shown(made))
    for said in (
        "no findings",
        "proven at dp_shard=2, tp=2",
        "Tensor parallel",
        "Sequence parallel",
        "dp_shard: a unit",
        "tp: Shard(0)",
        "input_with_grad_allreduce",
        "fits h100",
        "at the peak",
        "reduce_scatter",
        "forward: all-reduce",
        "worst error",
    ):
        assert said in page.text, said
    assert page.tags.count("svg") == 2
    titles = [value for name, value in page.attributes if name == "title"]
    assert any("model.layers.0-2.mlp.up_proj\nweight: Shard(0) [48, 64]" in one for one in titles)


def test_a_pipeline_with_every_axis():
    """Each module's place on each axis of the mesh, and the stages."""
    staged = {
        "version": "1",
        "extends": "llama",
        "pipeline_parallel": {
            "layers": "model.layers.*",
            "first": ["model.embed_tokens"],
            "last": ["model.norm", "lm_head"],
        },
    }
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    made = plan_report(CONFIG, staged, mesh, proof=False, sequence_parallel=True)
    assert made.pipeline is not None and made.pipeline.sizes == (2, 1)
    page = Page(shown(made))
    for said in (
        "tp: Shard(0)",
        "sp: gathers the sequence",
        "sp: returns a slice",
        "dp_shard: Shard(0)",
        "dp_replicate: Replicate",
        "pp: stage 0",
        "pp: stage 1",
        "model.layers.0-1",
        "model.norm, lm_head",
        "stages of the model, one after the other",
    ):
        assert said in page.text, said


def test_experts_and_sequences_have_their_axes():
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    made = plan_report(config, "auto", {"dp_shard": 4, "tp": 1, "ep": 2}, proof=False)
    page = Page(shown(made))
    assert "ep: Shard(0)" in page.text and "dp_shard: over 2 ranks with the same experts" in page.text
    split = Page(shown(plan_report(CONFIG, "llama", {"dp_shard": 2, "cp": 2}, proof=False, sequence_parallel=False)))
    assert "dp_shard x cp: Shard(0)" in split.text and "a slice of each sequence" in split.text


def test_the_flow_is_in_the_order_in_which_modules_run(made):
    block, calls = made.flow
    names = [name for name, _ in calls]
    assert block.startswith("model.layers.")
    order = ["input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp"]
    assert [name for name in names if name in order] == order
    assert dict(calls)["self_attn.q_proj"] == 1 and dict(calls)["mlp"] == 0


def test_it_asks_for_nothing_and_runs_nothing(made):
    content = shown(made)
    page = Page(content)
    assert not {"script", "iframe", "object", "img"} & set(page.tags)
    assert "http" not in content.replace("http-equiv", "")
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]


class Odd(nn.Module):
    """A model with names that look like markup."""

    def __init__(self):
        super().__init__()
        self.add_module("a<b>", nn.Linear(8, 8))
        self.add_module(HOSTILE.replace(".", ""), nn.Linear(8, 8))

    def forward(self, ids):
        x = nn.functional.one_hot(ids % 8, 8).float()
        for layer in self.children():
            x = torch.relu(layer(x))
        return x


def test_names_of_modules_are_text():
    made = plan_report(
        Model(Odd(), inputs=lambda seed: {"ids": torch.arange(8)[None]}), {"version": "1", "name": "odd"}, {"tp": 1}
    )
    page = Page(shown(made))
    assert HOSTILE in page.text
    assert "script" not in page.tags and "img" not in page.tags


def test_names_and_findings_are_text():
    finding = Diagnostic("SP201", Severity.ERROR, HOSTILE, notes=(HOSTILE,), help=HOSTILE, modules=(HOSTILE,))
    content = html_report(HOSTILE, HOSTILE, MeshSizes(tp=2), Report((finding,)), {}, {}, ("", ()))
    page = Page(content)
    assert "script" not in page.tags and "img" not in page.tags and page.text.count(HOSTILE) >= 4
    assert not {"\x1b", "\u202e"} & set(text("\x1b[31m\u202e"))


def test_no_text_ends_an_attribute():
    assert not set("<>\"'") & set(text(HOSTILE)) and "&quot;" in text(HOSTILE)


def test_a_wrong_plan_is_its_findings():
    wrong = {"version": "1", "tensor_parallel": {"model.layers.*.mlp.down_proj": "rowwise", "no.such": "colwise"}}
    made = plan_report(CONFIG, wrong, {"tp": 2})
    page = Page(shown(made))
    assert not made.report.ok and "error[SP201]" in page.text and "svg" not in page.tags


def test_the_command(tmp_path, capsys):
    small = [
        w
        for name in ("vocab_size", "hidden_size", "num_hidden_layers")
        for w in ("--set", f"{name}={getattr(CONFIG, name)}")
    ]
    small += ["--set", "intermediate_size=96", "--set", "num_attention_heads=8", "--set", "num_key_value_heads=4"]
    out = tmp_path / "report.html"
    assert main(["show", "llama", "llama", *small, "--no-proof", "--no-sequence-parallel", "--html", str(out)]) == 0
    page = Page(out.read_text("utf-8"))
    assert "not proven" in page.text and page.tags.count("svg") == 1
    assert main(["show", "llama", "no.yaml", "--html", str(out)]) == 1
    assert "SP101" in Page(out.read_text("utf-8")).text
    assert main(["show", "llama", "llama", "--device", "h100", "--html", str(out)]) == 2
    assert main(["show", "llama", "llama", "--seq-len", "8"]) == 2
    assert main(["show", "llama", "llama", *small, "--no-proof", "--html", str(tmp_path / "no" / "x.html")]) == 2


class SummedBlock(nn.Module):
    """Adds up two results, and norms each head with a weight that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head_norm = nn.LayerNorm(4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.head_norm(self.q(x).unflatten(-1, (-1, 4))).flatten(-2)
        return x + self.o(heads) + self.down(self.up(x).relu())


def test_blocks_with_a_sum_are_one_and_a_partial_gradient_is_called_so():
    rules = {
        "layers.*": {"style": "replicate", "sum_outputs": ["o", "down"]},
        "layers.*.{q,up}": "colwise",
        "layers.*.head_norm": "replicated_with_grad_allreduce",
        "layers.*.{o,down}": "rowwise",
    }
    model = Model(Stack(SummedBlock), inputs=tokens)
    made = plan_report(model, {"version": "1", "tensor_parallel": rules}, {"tp": 2}, proof=False)
    page = Page(shown(made)).text
    assert "weight I read as R" in page and "weight V(0)" in page and "weight V(0) read" not in page
    assert "out P, reduced at layers.*.down" in page
    assert page.count("head_norm") == 3  # once in the tree of equal blocks; in the flow with the title of its box
