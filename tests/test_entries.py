"""Both entries as users call them: under torchrun, from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.training import TINY

from megatron_ext.metrics import files

pytestmark = pytest.mark.slow


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


def test_pretrain_gpt_under_torchrun(tmp_path: Path) -> None:
    job = torchrun(
        *("--nproc-per-node", "2", "-m", "megatron_ext.pretrain_gpt"),
        *TINY.split(),
        *("--metrics-dir", "metrics"),
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    rows = files.read(tmp_path / "metrics" / files.METRICS)
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert [row["split"] for row in rows if row["kind"] == "eval"] == ["valid", "test"]


def test_run_takes_an_unmodified_script_and_its_neighbours(tmp_path: Path) -> None:
    # As in a Megatron checkout, started inside it: modules beside the script, and a core that
    # must not hide the installed one.
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("raise SystemExit('wrong core')")
    (tmp_path / "my_model.py").write_text("FLAGS = '--moe-router-bias-update-rule'\n")
    (tmp_path / "pretrain_mine.py").write_text(
        "from my_model import FLAGS\n"
        "from megatron.training.arguments import parse_and_validate_args\n"
        "from megatron_ext.pretrain_gpt import datasets_provider, forward_step\n"
        "from megatron.core.enums import ModelType\n"
        "from megatron.training import pretrain\n"
        "from megatron.training.argument_utils import (\n"
        "    gpt_config_from_args, pretrain_cfg_container_from_args)\n"
        "if __name__ == '__main__':\n"
        "    args = parse_and_validate_args(args_defaults={'tokenizer_type': 'NullTokenizer'})\n"
        "    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))\n"
        "    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)\n"
    )
    job = torchrun(
        *("--nproc-per-node", "1", "-m", "megatron_ext.run"),
        *(str(tmp_path / "pretrain_mine.py"), *TINY.split(), "--metrics-dir", "metrics"),
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    assert len(files.read(tmp_path / "metrics" / files.METRICS)) == 6
    assert f"megatron_ext: not the one in {tmp_path}: to use that, pip install -e" in job.stdout


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_help_lists_the_extension_flags_in_groups_of_their_own() -> None:
    shown = python("-m", "megatron_ext.pretrain_gpt", "--help")
    assert shown.returncode == 0
    group = shown.stdout.split("megatron_ext: expert balance:")[1]
    assert "--moe-router-bias-update-rule {sign,centered-sign}" in group
    assert "--metrics-dir" in group.split("megatron_ext: metrics:")[1]


def test_a_script_that_is_not_there_is_named() -> None:
    job = python("-m", "megatron_ext.run", "no/such/pretrain_gpt.py")
    assert job.returncode == 2
    assert job.stderr == (
        "megatron_ext: error: no/such/pretrain_gpt.py is no file: give the path of a Megatron "
        "script, e.g. pretrain_gpt.py\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--moe-router-bias-update-rule centered-sign",
            "--moe-router-bias-update-rule centered-sign changes a bias that is not there: add "
            "--moe-router-enable-expert-bias",
        ),
        (
            "--moe-router-bias-update-rule median",
            "argument --moe-router-bias-update-rule: invalid choice: 'median' (choose from 'sign', "
            "'centered-sign')",
        ),
        ("--metrics-dir /dev/null/metrics", "--metrics-dir /dev/null/metrics cannot be made"),
        ("--lr-warmup-iters 8", "--lr-warmup-iters 8 leaves no iteration to decay in"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_training(flags: str, message: str) -> None:
    job = python("-m", "megatron_ext.pretrain_gpt", *TINY.split(), *flags.split())
    assert job.returncode == 2
    last = job.stderr.splitlines()[-1]
    assert last.startswith("megatron_ext: error: ")
    assert message in last
