"""Pretrains a GPT with the extension installed; needs only the megatron-core wheel.

    torchrun --nproc-per-node 4 -m megatron_ext.pretrain_gpt <megatron flags> <extension flags>

The model, its parallel layout, data and optimizer are Megatron's, by Megatron's flags. For a
script of your own, or of a Megatron checkout, use ``megatron_ext.run``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.arguments import FlagError, fail
from megatron_ext.entry import prepare


def main() -> None:
    prepare()

    # Imported late: the extension has to be installed first.
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    try:
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        refuse(args)
    except (AssertionError, ValueError) as error:
        # Megatron's refusals come as these; a bare assert says the most by its own source.
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"Megatron asks for: {line.line} ({Path(line.filename).name}:{line.lineno})"
        fail(" ".join(str(error).split()) or where)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


def refuse(args: Any) -> None:
    """Raises FlagError for what this script, unlike Megatron's own, does not do."""
    for field in (
        "sft",
        "fim_data",
        "dataloader_inter_document_masking",
        "hybrid_context_parallel",
        "mtp_num_layers",
    ):
        if getattr(args, field, None):
            flag = "--" + field.replace("_", "-")
            raise FlagError(
                f"{flag} is not supported by megatron_ext.pretrain_gpt: run Megatron's own script "
                "with python -m megatron_ext.run pretrain_gpt.py"
            )


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """One micro-batch: the model's output and the function that makes the loss of it."""
    batch = get_batch(data_iterator, model)
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, partial(loss_function, batch.get("loss_mask"))


def loss_function(loss_mask: Any, losses: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum over the tokens that count, their number, and both for the log.

    ``losses`` and ``loss_mask``: (micro-batch, sequence), nats a token. Megatron divides the sum
    by the number: of the micro-batch, or of the global batch with ``--calculate-per-token-loss``.
    """
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: ~torch.isfinite(value),
            message="the loss of this micro-batch is NaN or infinite",
            tolerance=0.0,
            fatal=True,
        )
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def get_batch(data_iterator: Iterator[dict[str, Any]], model: Any) -> dict[str, Any]:
    """This rank's part of the next micro-batch; empty on a stage in the middle.

    Only the first TP rank reads data; the others receive it.
    """
    from megatron.core import mpu
    from megatron.core.utils import (
        get_attr_wrapped_model,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    args = get_args()
    if not is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        return {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Training, validation and test sets of ``num_samples`` sequences each; None where unused."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import (
        get_blend_and_blend_per_split,
        is_first_or_last_pipeline_stage,
    )

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        object_storage_cache_path=args.object_storage_cache_path,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=_sequences_per_dataset(args.per_dataset_sequences_path),
    )

    def built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(
            vp_stage
        )

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, built_here, config).build()


def _sequences_per_dataset(path: str | None) -> dict[str, Any] | None:
    return None if path is None else json.loads(Path(path).read_text())


# Every rank calls it, and the builder decides where data is really read.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
