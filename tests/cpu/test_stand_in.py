"""When the device stand-in is used, what it means, and what it refuses."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megatron_ext
from megatron_ext import cpu
from megatron_ext.arguments import FlagError
from megatron_ext.cpu import flags
from megatron_ext.cpu.placement import on_cpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """machine(gpu_usable=..., gpu_there=..., choice=...) sets what ``wanted`` finds."""

    def describe(*, gpu_usable: bool, gpu_there: bool, choice: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_usable)
        monkeypatch.setattr(cpu.glob, "glob", lambda _: ["/dev/nvidia0"] if gpu_there else [])
        monkeypatch.delenv("MEGATRON_EXT_DEVICE", raising=False)
        if choice is not None:
            monkeypatch.setenv("MEGATRON_EXT_DEVICE", choice)

    cpu.wanted.cache_clear()
    yield describe
    cpu.wanted.cache_clear()


@pytest.mark.parametrize(
    ("gpu_usable", "gpu_there", "choice", "expected"),
    [
        (False, False, None, True),
        (True, True, None, False),
        (True, True, "cpu", True),
        (True, True, "cuda", False),
        (False, True, "cpu", True),
    ],
)
def test_the_stand_in_is_used_without_a_gpu_or_on_request(
    machine: Any, gpu_usable: bool, gpu_there: bool, choice: str | None, expected: bool
) -> None:
    machine(gpu_usable=gpu_usable, gpu_there=gpu_there, choice=choice)
    assert cpu.wanted() is expected


@pytest.mark.parametrize(
    ("gpu_there", "choice", "message"),
    [
        (True, None, "has an NVIDIA GPU that torch .* cannot use"),
        (False, "cuda", "MEGATRON_EXT_DEVICE=cuda, but torch .* finds no GPU"),
        (False, "gpu", "MEGATRON_EXT_DEVICE='gpu' is unknown: use cpu or cuda"),
    ],
)
def test_an_accident_is_refused(
    machine: Any, gpu_there: bool, choice: str | None, message: str
) -> None:
    machine(gpu_usable=False, gpu_there=gpu_there, choice=choice)
    with pytest.raises(cpu.DeviceChoiceError, match=message):
        cpu.wanted()


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, 2, torch.device("cuda", 1)])
def test_every_spelling_of_a_cuda_device_is_the_cpu(device: Any) -> None:
    assert on_cpu(device) == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("meta"), True])
def test_other_devices_are_left_alone(device: Any) -> None:
    assert on_cpu(device) is device


@pytest.fixture
def stand_in(machine: Any) -> Iterator[None]:
    machine(gpu_usable=False, gpu_there=False, choice="cpu")
    megatron_ext.install()
    yield
    megatron_ext.uninstall()


def test_tensors_on_cuda_are_on_the_cpu_and_look_like_cuda_to_megatron(stand_in: None) -> None:
    tensor = torch.zeros(2, device="cuda", pin_memory=True)
    assert tensor.device.type == "cpu"
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert tensor.to(0) is tensor and tensor.cuda() is tensor
    assert tensor.to("cuda", torch.bfloat16).dtype == torch.bfloat16
    assert tensor.to(device="cuda:0", dtype=torch.float64).dtype == torch.float64
    assert tensor.new_ones(1, device=torch.device("cuda")).device.type == "cpu"
    assert torch.zeros(1, device="meta").device.type == "meta"
    assert torch.nn.Linear(2, 2, device="cuda").cuda().weight.device.type == "cpu"


def test_device_random_numbers_come_from_the_cpus_generator(stand_in: None) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.manual_seed(5)
    state = megatron_random._get_cuda_rng_state()
    first = torch.rand(4, device="cuda")
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    assert torch.equal(torch.rand(4), torch.rand(4)) is False


def test_events_measure_the_time_between_their_records(stand_in: None) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    sum(range(100_000))
    end.record()
    assert 0 < start.elapsed_time(end) < 10_000


def test_what_has_no_meaning_here_is_torchs_own(stand_in: None) -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|dummy"):
        torch.cuda.CUDAGraph()


def parser_of_megatron() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


def parsed(command_line: str) -> Namespace:
    parser = parser_of_megatron()
    flags.set_defaults(parser)
    return parser.parse_args(command_line.split())


def test_the_defaults_are_carried(stand_in: None) -> None:
    args = parsed("")
    flags.refuse(args)
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert args.no_persist_layer_norm and not args.gradient_accumulation_fusion


def test_every_field_and_flag_of_the_tables_is_megatrons(stand_in: None) -> None:
    parser = parser_of_megatron()
    options = {action.dest: action.option_strings for action in parser._actions}
    assert set(flags.DEFAULTS) <= set(options)
    for field, (_, flag, _) in flags.REFUSED.items():
        assert flag in options[field], field


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine cannot"),
        ("--context-parallel-size 2", "--context-parallel-size 2 cannot be carried"),
        ("--fp8-format hybrid", "--fp8-format hybrid cannot be carried"),
        ("--moe-grouped-gemm", "--moe-grouped-gemm cannot be carried"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp cannot be carried"),
        ("--distributed-backend nccl", "--distributed-backend nccl cannot be carried"),
        ("--optimizer muon", "--optimizer muon cannot be carried without a GPU: use adam or sgd"),
        (
            "--num-experts 2 --moe-token-dispatcher-type flex",
            "--moe-token-dispatcher-type flex needs GPUs: use allgather or alltoall",
        ),
    ],
)
def test_what_it_cannot_carry_is_refused_by_name(
    stand_in: None, command_line: str, message: str
) -> None:
    with pytest.raises(FlagError, match=message):
        flags.refuse(parsed(command_line))
