"""The examples, in a short form, as a user starts them; and the helpers that their results rest on."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import llama  # noqa: E402
import train_gpt  # noqa: E402
from tests.programs import Program, run, start  # noqa: E402

SMALL_GPT = "examples/train_gpt.py --dim 64 --layers 2 --seq 32 --batch 8 --eval-every 1000 --backend aot_eager"


# ----------------------------------------------------------------------------------------------------------
# Training the GPT


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a training on two ranks, killed and started again, and the number of its last step."""
    folder = tmp_path_factory.mktemp("resumed")
    options = f"--checkpoint {folder}/checkpoint --checkpoint-every 4"
    options += f" --losses {folder}/losses.jsonl --out {folder}/graphs"
    ranks = start(f"{SMALL_GPT} {options} --steps 100000", 2)
    try:
        wait_for_checkpoint(folder / "checkpoint", ranks)
    finally:
        ranks.kill()
    last_step = int(train_gpt.latest_checkpoint(folder / "checkpoint").name.removeprefix("step-")) + 6
    output = run(f"{SMALL_GPT} {options} --steps {last_step}", 2)
    assert "resumed from" in output
    return folder, last_step


def wait_for_checkpoint(folder: Path, ranks: Program) -> None:
    deadline = time.monotonic() + 120
    while train_gpt.latest_checkpoint(folder) is None:
        assert time.monotonic() < deadline and ranks.is_running
        time.sleep(0.05)


def test_gpt_killed_and_resumed_has_the_losses_of_the_unsharded_model(
    resumed: tuple[Path, int], tmp_path: Path
) -> None:
    folder, last_step = resumed
    losses = train_gpt.read_losses(folder / "losses.jsonl")
    assert list(losses) == list(range(1, last_step + 1))
    run(f"{SMALL_GPT} --reference --steps {last_step} --losses {tmp_path}/losses.jsonl")
    assert losses == pytest.approx(train_gpt.read_losses(tmp_path / "losses.jsonl"), abs=1e-4)


def test_gpt_writes_its_graphs_its_schedule_and_a_report(resumed: tuple[Path, int]) -> None:
    graphs = resumed[0] / "graphs"
    assert "fsdp.all_gather" in (graphs / "forward.txt").read_text()
    assert "fsdp.reduce_scatter" in (graphs / "backward.txt").read_text()
    assert "all_gather blocks.0" in (graphs / "schedule.txt").read_text()
    assert (graphs / "report.html").stat().st_size < 2e6


def test_gpt_in_one_process_ends_at_the_time_limit_and_stays_there(tmp_path: Path) -> None:
    command = f"{SMALL_GPT} --steps 100000 --time-limit 0 --checkpoint {tmp_path}/steps --out {tmp_path}"
    output = run(command)
    assert "step     1  loss" in output and "ended after step 1, for 0 s are over" in output
    assert "all_gather" not in (tmp_path / "schedule.txt").read_text()  # one process gathers nothing
    assert "nothing left to do" in run(command)
    assert [place.name for place in (tmp_path / "steps").iterdir()] == ["step-000001"]


def test_batch_depends_on_the_step_alone() -> None:
    data, _ = train_gpt.read_text()
    first, again, next_one = (train_gpt.training_batch(data, step, 4, 16) for step in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], next_one[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_rows_of_all_ranks_are_the_batch() -> None:
    batch = train_gpt.training_batch(train_gpt.read_text()[0], step=1, batch=6, seq=16)
    ranks = [train_gpt.Ranks(rank, 3, torch.device("cpu")) for rank in range(3)]
    tokens, targets = zip(*(rank.rows(batch) for rank in ranks), strict=True)
    assert torch.equal(torch.cat(tokens), batch[0]) and torch.equal(torch.cat(targets), batch[1])


def test_held_out_text_is_the_last_tenth_and_read_once() -> None:
    training, held_out = train_gpt.read_text()
    assert 0.1 <= len(held_out) / (len(training) + len(held_out)) < 0.1001
    tokens = torch.cat([tokens.flatten() for tokens, _ in train_gpt.held_out_batches(held_out, 4, 16)])
    targets = torch.cat([targets.flatten() for _, targets in train_gpt.held_out_batches(held_out, 4, 16)])
    assert len(tokens) > len(held_out) - 64 - 1
    assert torch.equal(tokens, held_out[: len(tokens)]) and torch.equal(targets, held_out[1 : len(tokens) + 1])


def test_resumed_log_keeps_only_what_the_checkpoint_holds(tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    log.write_text("".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 10)))
    train_gpt.open_log(log, num_steps_done=7).close()
    assert train_gpt.read_losses(log) == {step: 1 / step for step in range(1, 8)}
    train_gpt.open_log(log, num_steps_done=0).close()
    assert train_gpt.read_losses(log) == {}


def test_half_written_checkpoint_is_not_the_latest(tmp_path: Path) -> None:
    for name in ("step-000004", "step-000012", "step-000016.partial"):
        (tmp_path / name).mkdir()
    assert train_gpt.latest_checkpoint(tmp_path) == tmp_path / "step-000012"
    assert train_gpt.latest_checkpoint(tmp_path / "elsewhere") is None


def test_held_bytes_count_a_storage_once() -> None:
    storage = torch.zeros(10)
    assert train_gpt.held_bytes([storage[:4], storage[6:], torch.zeros(2)]) == 48


# ----------------------------------------------------------------------------------------------------------
# The others


def test_digits_are_told_apart_by_three_units_on_three_ranks() -> None:
    output = run("examples/train_digits.py --epochs 6 --backend aot_eager", 3)
    accuracy = re.search(r"test accuracy (\S+)", output)
    assert accuracy and float(accuracy[1]) > 0.95, output


def test_adapters_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    short = f"--layers 2 --steps 24 --batch 4 --seq 64 --base int8 --backend aot_eager --out {tmp_path}"
    output = run(f"examples/finetune_lora.py {short}", 2)
    assert "58,368 of 1,046,336 parameters are trainable" in output  # 3,968 are scales of rows
    before, after, loaded = map(float, re.findall(r"held-out loss .*?([0-9.]+) nats", output))
    assert loaded == pytest.approx(after, abs=2e-4) and after != pytest.approx(before, abs=2e-3), output
    adapters = safetensors.torch.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapters.values()) == 58_368


def test_a_script_for_fsdp2_has_the_same_losses_with_both_imports() -> None:
    short = "--steps 4 --batch 4 --seq 32 --dim 64 --layers 2 --backend aot_eager"
    output = run(f"examples/migrate_from_fsdp2.py --compare {short}", 2)
    losses = re.findall(r"^(\S+): loss (\S+) at step 1, (\S+) at step 4$", output, re.MULTILINE)
    assert [name for name, *_ in losses] == ["fsdp_compile.compat", "torch.distributed.fsdp"], output
    assert all(float(last) < float(first) for _, first, last in losses)
    difference = re.search(r"largest difference over 4 steps: (\S+)", output)
    assert difference and float(difference[1]) < 1e-5


def test_inspect_graph_prints_both_graphs_and_the_schedule() -> None:
    output = run("examples/inspect_graph.py")
    for words in ("forward(layers.0", "backward(", "fsdp.free(", "all_gather layers.1"):
        assert words in output


def test_llama_is_rewritten_on_the_meta_device() -> None:
    output = run("examples/llama.py --config small --seq 32")
    assert "all_gather layers.1" in output and "world size 64" in output


def test_a_mixture_of_experts_is_rewritten_on_the_meta_device() -> None:
    output = run("examples/mixture.py")
    assert "all_to_all_single" in output and "all_gather layers.1/bfloat16.on_efsdp" in output


def test_llama3_8b_has_its_number_of_parameters() -> None:
    model = llama.llama3_8b()
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_llama_knows_nothing_before_training() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(llama.SMALL.vocab, (4, 32))
    assert llama.Llama(llama.SMALL)(tokens, tokens).item() == pytest.approx(math.log(llama.SMALL.vocab), abs=0.3)


def test_rotation_sees_relative_positions_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, llama.SMALL.head_dim).expand(-1, -1, -1, 8, -1)
    angles = llama.rotary_angles(8, llama.SMALL, torch.device("cpu"))
    scores = (llama.rotate(q, *angles) @ llama.rotate(k, *angles).transpose(-1, -2)).squeeze()
    for distance in range(-7, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_training_script_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    script = re.search(r"## Use\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert script
    (tmp_path / "train.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"{tmp_path}/train.py"]
    assert "reduce_scatter" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


# ----------------------------------------------------------------------------------------------------------
# torchtitan


def test_a_small_model_trains_as_torchtitan_would_shard_it() -> None:
    printed = [run("examples/torchtitan_parallelize.py", num_ranks) for num_ranks in (1, 2)]
    losses = [[float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for text in printed]
    for found in losses:
        assert len(found) == 5 and found == sorted(found, reverse=True)
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.1)  # other rows, the same model
