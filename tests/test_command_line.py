"""`python -m fsdp_compile`, as a user starts it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_compile import rewrite
from fsdp_compile.cli.doctor import Finding
from fsdp_compile.cli.main import main
from fsdp_compile.cli.meshes import notes_on_meshes
from fsdp_compile.costs import predict
from fsdp_compile.costs.hardware import find_hardware
from fsdp_compile.report import Schedule, page, trace
from tests.passes.tiny import rows, three_layers

ROOT = Path(__file__).parents[1]
MODEL = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def small():
    return nn.Sequential(*[Layer() for _ in range(4)])

def deep():
    return nn.Sequential(*[Layer() for _ in range(12)])

def inputs(batch, seq):
    return (torch.zeros(batch, seq, 64),)

def stages(model, number):
    size = len(model) // number
    return [model[index : index + size] for index in range(0, size * number, size)]

def one_stage(model, number):
    return [model]

def wide(model, number):
    return [nn.Linear(64, 63), model[2:]]

def narrow_stages(model, number):
    return [nn.Linear(63, 64), model[2:]]

def parallelize(model, mesh):
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

def of_four(model, mesh):
    if mesh["tp"].size() > 4:
        raise ValueError("4 ranks at most")
    parallelize(model, mesh)

def unsplit(model, mesh):
    return model

def of_heads():
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))

def of_width(width):
    return nn.Linear(width, width)

def inputs_only():
    return inputs(1, 1)

def single(batch, seq):
    return torch.zeros(batch, seq, 64)

def narrow(batch, seq):
    return (torch.zeros(batch, seq, 63),)
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:small"


def plan(capsys, *arguments):
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_plan_for_every_combination(model, capsys):
    found = plan(capsys, model, "--gpus", "8", "16", "--batch", "1", "4", "--seq", "128", "--hardware", "a100-80")
    assert (found["hardware"], found["digest"]) == ("a100-80", find_hardware("a100-80").digest)
    rows = found["plans"]
    assert [(row["gpus"], row["batch"]) for row in rows] == [(8, 1), (8, 4), (16, 1), (16, 4)]
    for row in rows:
        assert row["seconds"] >= row["lower_bound_seconds"] > 0
        assert row["tokens_per_second_per_gpu"] == pytest.approx(row["batch"] * 128 / row["seconds"])
        assert row["peak_bytes"] == sum(row["peak_bytes_by_category"].values())
    num_bytes = 4 * 4 * (2 * 64 * 256 + 64 + 256)
    assert [row["peak_bytes_by_category"]["shards"] for row in rows[::2]] == [num_bytes // 8, num_bytes // 16]


def test_strategies_differ_in_what_they_hold_and_send(model, capsys):
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
    rows = plan(capsys, model, "--gpus", "16", "--strategy", *strategies, "--batch", "64")["plans"]
    peaks = {row["strategy"]: row["peak_bytes_by_category"] for row in rows}
    assert [row["strategy"] for row in rows] == strategies
    assert peaks["NO_SHARD"]["shards"] == 16 * peaks["FULL_SHARD"]["shards"] == 8 * peaks["HYBRID_SHARD"]["shards"]
    assert peaks["SHARD_GRAD_OP"]["gathered"] > peaks["FULL_SHARD"]["gathered"]


@pytest.mark.filterwarnings("error::FutureWarning")  # of torch, about copies of what takes trees
def test_auto_is_the_strategy_that_was_chosen(model, capsys):
    rows = plan(capsys, model, "--strategy", "NO_SHARD", "auto", "--batch", "1", "4096")["plans"]
    assert [row["strategy"] for row in rows] == ["NO_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "NO_SHARD"]
    assert rows[1]["seconds"] < rows[0]["seconds"] and rows[3]["seconds"] == rows[2]["seconds"]


def test_meshes_of_as_many_ranks_come_best_first(model, capsys):
    """Rows of all ranks are the same; two ranks that split the model are neighbours, so that they share a node."""
    arguments = [model, "--parallelize", "of_four", "--gpus", "16", "--seq", "128", "--hardware", "a100-80"]
    rows = plan(capsys, *arguments, "--mesh", "auto", "--global-batch", "32")["plans"]
    assert {(row["mesh"]["dp"], row["mesh"].get("tp"), row["batch"]) for row in rows} == {
        (16, None, 2),
        (8, 2, 4),
        (4, 4, 8),
    }
    rates = [row["tokens_per_second_per_gpu"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    by_split = {row["mesh"].get("tp"): row for row in rows}
    assert [bool(row["model_collectives_seconds"]) for row in (by_split[None], by_split[2])] == [False, True]
    shards = [by_split[split]["peak_bytes_by_category"]["shards"] for split in (None, 2, 4)]
    biases = 4 * 4 * 64  # of `down`, which ranks that split the model have alike
    assert shards == [shards[0], shards[0] + biases // 16, shards[0] + 3 * biases // 16]
    same = plan(capsys, *arguments, "--mesh", "dp=8,tp=2", "--batch", "4")["plans"]
    assert same == [by_split[2]]
    (in_pieces,) = plan(capsys, *arguments, "--mesh", "dp=8,tp=2", "--batch", "4", "--collective-pieces", "2")["plans"]
    assert in_pieces["model_collectives_seconds"] != by_split[2]["model_collectives_seconds"]


def test_experts_are_split_over_some_of_the_data_ranks(capsys):
    """Their shards are as large as if they were sharded over all of these."""
    model = str(ROOT / "examples" / "mixture.py:mixture_small")
    arguments = [model, "--seq", "64", "--mesh", "dp=8", "dp=8,ep=4"]
    plans = plan(capsys, *arguments)["plans"]
    rows = {row["mesh"].get("ep"): row for row in plans}
    assert {row["gpus"] for row in rows.values()} == {8}
    assert [bool(row["model_collectives_seconds"]) for row in (rows[None], rows[4])] == [False, True]
    held = [rows[split]["peak_bytes_by_category"] for split in (None, 4)]
    assert held[0]["shards"] == held[1]["shards"]
    assert "on collectives of expert parallelism" in notes_on_meshes(plans)[0]


def test_stages_of_a_pipeline_have_ranks_of_their_own(model, capsys):
    """Two stages of the same layers hold half of the parameters each; the second one is predicted as the first."""
    arguments = [model, "--seq", "128", "--global-batch", "32", "--strategy", "SHARD_GRAD_OP"]
    meshes = ["dp=8", "dp=4,pp=2", "dp=2,tp=2,pp=2"]
    plans = plan(capsys, *arguments, "--parallelize", "of_four", "--mesh", *meshes)["plans"]
    found = {len(row["mesh"]): row for row in plans}
    assert [found[num]["batch"] for num in (1, 2, 3)] == [4, 8, 16]
    assert {row["gpus"] for row in found.values()} == {8}
    whole, halves, splits = (found[num]["peak_bytes_by_category"]["shards"] for num in (1, 2, 3))
    assert whole == halves < splits < 1.1 * halves  # biases of `down` are not split
    assert found[1]["idle_seconds"] == 0 < min(found[2]["idle_seconds"], found[3]["idle_seconds"])
    assert [bool(found[num]["model_collectives_seconds"]) for num in (1, 2, 3)] == [False, False, True]
    larger = plan(capsys, *arguments, "--mesh", "dp=4,pp=2", "--micro-batch", "2")["plans"]
    assert larger[0]["peak_bytes"] > found[2]["peak_bytes"] and larger[0]["seconds"] < found[2]["seconds"]
    (note,) = notes_on_meshes(plans)
    assert "of it in the pipeline" in note and "; dp=" in note


def test_ranks_with_two_stages_of_a_pipeline_idle_less(model, capsys):
    arguments = [model.replace("small", "deep"), "--seq", "128", "--batch", "8", "--strategy", "SHARD_GRAD_OP"]
    main(["plan", *arguments, "--mesh", "dp=4,pp=2", "dp=4,pp=2x2", "--json"])
    rows = {row["stages_of_rank"]: row for row in json.loads(capsys.readouterr().out)["plans"]}
    assert [rows[number]["mesh"] for number in (1, 2)] == [{"dp": 4, "pp": 2}] * 2
    assert rows[2]["idle_seconds"] < rows[1]["idle_seconds"]
    held = [rows[number]["peak_bytes_by_category"]["shards"] for number in (1, 2)]
    assert held[0] == held[1]
    main(["plan", *arguments, "--mesh", "dp=4,pp=2x2"])
    assert "dp=4,pp=2x2" in capsys.readouterr().out


def test_every_mesh_with_stages_that_are_whole_nodes(model, capsys):
    arguments = ["--parallelize", "of_four", "--stages", "stages", "--gpus", "16", "--seq", "128"]
    main(["plan", model, *arguments, "--mesh", "auto", "--global-batch", "32", "--json"])
    said = capsys.readouterr()
    rows = json.loads(said.out)["plans"]
    assert {tuple(row["mesh"].items()) for row in rows} == {
        *((("dp", 16 // tp),) + (("tp", tp),) * (tp > 1) for tp in (1, 2, 4)),
        *((("dp", 8 // tp),) + (("tp", tp),) * (tp > 1) + (("pp", 2),) for tp in (1, 2, 4)),
    }
    assert "left out: dp=1,tp=8,pp=2: ConfigError: of_four()" in said.err
    rates = [row["tokens_per_second_per_gpu"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(SystemExit, match="--stages is for meshes with pp, and there is none"):
        main(["plan", model, *arguments, "--gpus", "8", "--mesh", "auto", "--global-batch", "32"])


def test_auto_is_one_strategy_for_all_stages(model, capsys, tmp_path):
    """The fastest that fits, by the time and the memory of the pipeline."""
    strategies = ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"]
    arguments = [model, "--seq", "128", "--mesh", "dp=4,pp=2", "--batch", "8"]
    rows = {row["strategy"]: row for row in plan(capsys, *arguments, "--strategy", *strategies)["plans"]}
    (chosen,) = plan(capsys, *arguments, "--strategy", "auto")["plans"]
    assert chosen == rows[chosen["strategy"]]
    assert chosen["seconds"] <= 1.01 * min(row["seconds"] for row in rows.values())
    small = dataclasses.replace(
        find_hardware("h100"), name="small", memory=int(1.06 * rows["FULL_SHARD"]["peak_bytes"])
    )
    assert small.memory < min(rows["NO_SHARD"]["peak_bytes"], rows["SHARD_GRAD_OP"]["peak_bytes"])
    profile = tmp_path / "small.json"
    profile.write_text(small.to_json())
    main(["plan", *arguments, "--strategy", "auto", "--hardware", str(profile)])
    assert "FULL_SHARD is the fastest on small that fits into" in capsys.readouterr().out.replace("\n", " ")


def test_what_a_mesh_leaves_out_is_said(model, capsys):
    main(["plan", model, "--gpus", "16", "--mesh", "auto", "--parallelize", "of_four", "--global-batch", "8"])
    said = capsys.readouterr()
    assert "left out: 8 rows are no multiple of the ranks of dp=16" in said.err
    assert "left out: dp=2,tp=8: ConfigError: of_four()" in said.err and "4 ranks at most" in said.err
    assert "dp=8,tp=2" in said.out and "dp=4,tp=4" in said.out and "dp=16" not in said.out
    assert "…" not in said.out  # no column is cut


def test_without_any_mesh_it_is_an_error(model, capsys):
    arguments = ["--gpus", "16", "--mesh", "auto", "--parallelize", "of_four", "--global-batch", "1"]
    with pytest.raises(SystemExit, match="--mesh auto: every mesh was left out"):
        main(["plan", model, *arguments])
    assert "MFU" not in capsys.readouterr().out


def test_a_few_layers_are_traced_for_all(model, capsys):
    arguments = [model.replace("small", "deep"), "--gpus", "8", "--seq", "512"]
    again = [*arguments, "--activation-checkpointing"]
    few, of_again = plan(capsys, *arguments), plan(capsys, *again)
    assert (few, of_again) == (plan(capsys, *arguments, "--trace-all"), plan(capsys, *again, "--trace-all"))
    kept, computed_again = (found["plans"][0]["peak_bytes_by_category"]["activations"] for found in (few, of_again))
    assert computed_again < kept / 2


def test_hybrid_shards_are_ranks_of_a_node(model, capsys):
    arguments = [model, "--gpus", "16", "--seq", "128", "--mesh", "dp=8,tp=2"]
    rows = plan(capsys, *arguments, "--strategy", "FULL_SHARD", "HYBRID_SHARD")["plans"]
    shards = {row["strategy"]: row["peak_bytes_by_category"]["shards"] for row in rows}
    assert shards["HYBRID_SHARD"] == 2 * shards["FULL_SHARD"]


def test_what_does_not_fit_is_marked(model, capsys, tmp_path):
    small = dataclasses.replace(find_hardware("h100"), name="small", memory=1 << 20)
    profile = tmp_path / "small.json"
    profile.write_text(small.to_json())
    (row,) = plan(capsys, model, "--hardware", str(profile))["plans"]
    assert not row["fits"]
    main(["plan", model, "--hardware", str(profile)])
    assert "!" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.py:small"], "there is no file 'nowhere.py'"),
        (["{path}"], "say which function of the file returns the model"),
        (["{path}:of_width"], r"of_width\(\) raised TypeError: .*missing 1 required positional argument: 'width'"),
        (["{path}:inputs_only"], r"inputs_only\(\) returns a model, not tuple"),
        (["{path}:small", "--inputs", "of_width"], r"of_width\(1, 2048\) raised TypeError"),
        (["{path}:small", "--inputs", "single"], r"single\(1, 2048\) returns .* as a tuple, not Tensor"),
        (["{path}:small", "--inputs", "narrow"], r"called with what narrow\(1, 2048\) returned, raised RuntimeError"),
        (["{path}:large"], "has no function 'large'; it has .*small"),
        (["{path}:small", "--inputs", "rows"], "has no function 'rows'"),
        (["{path}:small", "--hardware", "k80"], "'k80' is neither a file nor one of"),
        (["{path}:small", "--gpus", "12", "--strategy", "HYBRID_SHARD"], "12 is no multiple of 8"),
        (["{path}:of_heads", "--activation-checkpointing"], r"of_heads\(\) has no list of equal layers"),
        (["{path}:small", "--gpus", "0"], "world_size is a positive int"),
        (
            ["{path}:small", "--mesh", "dp=4,tp"],
            "or sizes of dp, tp, ep and pp, as in dp=32,tp=8; not 'dp=4,tp'",
        ),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2"],
            "a pipeline of 2 stages needs as many micro-batches, and a step has 1: a rank has 1 rows, so change",
        ),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2x2", "--batch", "5"],
            "a step has 5, which is no multiple of 2: a rank has 5 rows, so change --batch or --micro-batch",
        ),
        (["{path}:small", "--mesh", "dp=4x2,pp=2"], "x has several stages on each rank of a pipeline, as in pp=4x2"),
        (["{path}:small", "--mesh", "dp=4,pp=1x2"], "x has several stages on each rank of a pipeline, as in pp=4x2"),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2", "--batch", "3", "--micro-batch", "2"],
            "--micro-batch 2: the 3 rows of a rank are no multiple of it",
        ),
        (["{path}:small", "--mesh", "dp=4,pp=2", "--batch", "2", "--stages", "cut"], "has no function 'cut'"),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2", "--batch", "2", "--stages", "one_stage"],
            r"one_stage\(\) returns 2 modules, as many as there are stages, not 1",
        ),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2", "--batch", "2", "--stages", "wide"],
            r"stage 1 of wide\(\), called with what the one before returned, raised RuntimeError",
        ),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2", "--batch", "2", "--stages", "narrow_stages"],
            r"stage 0 of narrow_stages\(\), called as the model is, raised RuntimeError",
        ),
        (["{path}:small", "--stages", "one_stage"], "--stages is for meshes with pp, and there is none"),
        (["{path}:small", "--mesh", "dp=4", "--micro-batch", "2"], "--micro-batch is for meshes with pp"),
        (
            ["{path}:small", "--mesh", "dp=4,pp=2", "--parallelize", "of_four"],
            "--parallelize is for meshes with tp or ep",
        ),
        (["{path}:small", "--mesh", "dp=4,ep=3"], "the ranks of ep are some of those of dp, whose number they divide"),
        (["{path}:small", "--mesh", "dp=4,ep=2", "--parallelize", "unsplit"], "nothing is split over it"),
        (
            ["{path}:small", "--mesh", "dp=16,ep=2", "--strategy", "HYBRID_SHARD", "--parallelize", "unsplit"],
            "HYBRID_SHARD is for models whose experts are not split, and the mesh is dp=16,ep=2",
        ),
        (["{path}:small", "--mesh", "tp=4,dp=2"], "--mesh is auto, .* not 'tp=4,dp=2'"),
        (["{path}:small", "--mesh", "dp=4,tp=2", "--parallelize", "split"], "has no function 'split'"),
        (["{path}:small", "--mesh", "dp=1,tp=8", "--parallelize", "of_four"], r"of_four\(\), which splits .* 4 ranks"),
    ],
)
def test_errors_are_one_line(model, arguments, message):
    path = model.rpartition(":")[0]
    with pytest.raises(SystemExit, match=message):
        main(["plan", *[argument.replace("{path}", path) for argument in arguments]])


@pytest.mark.parametrize(
    "line, message",
    [("steps = int('plan')", "ValueError: invalid literal"), ("raise SystemExit('usage: train')", "SystemExit: usage")],
)
def test_a_file_that_fails_when_it_is_run_is_named(tmp_path, line, message):
    script = tmp_path / "script.py"
    script.write_text(line)
    with pytest.raises(SystemExit, match=f"script.py, which is run for its functions, raised {message}"):
        main(["plan", f"{script}:model"])


def test_two_ranks_measure_this_machine_and_a_plan_uses_it(model, tmp_path):
    profile = tmp_path / "here.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["-m", "fsdp_compile", "calibrate", "--out", str(profile), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    printed = subprocess.run([*launch, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    hardware = find_hardware(str(profile))
    [kept] = (tmp_path / "fsdp_compile").iterdir()
    assert find_hardware(str(kept)) == hardware
    assert f"digest {hardware.digest}" in printed.stdout
    assert hardware.ranks_per_node == 2 and hardware.contention >= 1
    assert 1e6 < hardware.within_node.bandwidth < 1e12 and 1e8 < hardware.flops["float32"] < 1e14
    command = ["-m", "fsdp_compile", "plan", model, "--gpus", "2", "--hardware", str(profile)]
    shown = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "A step on here" in shown and "FULL_SHARD" in shown


def test_a_plan_as_a_page(model, capsys, tmp_path):
    plan(capsys, model, "--gpus", "8", "16", "--seq", "128", "--html", str(tmp_path / "plan.html"))
    text = (tmp_path / "plan.html").read_text()
    assert "8 GPUs, 1 x 128 tokens each, FULL_SHARD, on h100" in text and "16 GPUs" in text


def test_a_saved_schedule_is_reported(capsys, tmp_path):
    graphs = rewrite(three_layers(), rows(), world_size=2)
    schedule = Schedule.of(predict(graphs, find_hardware("h100")))
    saved = tmp_path / "schedule.json"
    saved.write_text(schedule.to_json())
    written = {name: str(tmp_path / f"report.{name}") for name in ("html", "trace")}
    main(["report", str(saved), "--html", written["html"], "--trace", written["trace"]])
    assert capsys.readouterr().out.strip() == schedule.about
    assert Path(written["html"]).read_text() == page([schedule])
    assert Path(written["trace"]).read_text() == trace({str(saved): schedule})


def test_errors_are_a_line_unless_the_traceback_is_asked_for(tmp_path):
    with pytest.raises(SystemExit, match="error: .*No such file"):
        main(["report", str(tmp_path / "missing.json")])
    with pytest.raises(FileNotFoundError):
        main(["--debug", "report", str(tmp_path / "missing.json")])


def test_the_doctor_trains_on_two_ranks():
    script = Path(sys.executable).with_name("fsdp-compile")
    found = subprocess.run([script, "doctor"], capture_output=True, text=True, check=True)
    said = found.stdout
    assert "leaked" not in found.stderr  # what ranks held when they ended
    for what in ("torch", "C++ compiler", "2 ranks with aot_eager", "2 ranks with inductor", "3 steps as with one"):
        assert what in said
    assert "wrong" not in said


def test_the_doctor_says_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr("fsdp_compile.cli.doctor.shutil.which", lambda name: None)
    monkeypatch.setattr("fsdp_compile.cli.doctor._rank", None)
    with pytest.raises(SystemExit):
        main(["doctor"])
    said = capsys.readouterr().out
    assert "none: use backend='aot_eager'" in said and "TypeError" in said


def test_the_doctor_prints_errors_as_they_are(capsys, monkeypatch):
    monkeypatch.setattr("fsdp_compile.cli.commands.examine", lambda: [Finding("2 ranks", "KeyError: '[blue]'", False)])
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert "2 ranks: KeyError: '[blue]' wrong" in capsys.readouterr().out


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("fsdp-compile")
    found = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert all(command in found.stdout for command in ("plan", "report", "calibrate", "doctor"))
