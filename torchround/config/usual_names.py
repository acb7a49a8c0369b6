"""The names that other trainers give to keys and values of this configuration, for messages about unknown ones.

Hugging Face's `TrainingArguments`, PEFT's `LoraConfig`, TRL, DeepSpeed and TorchTitan are what users come from. A name that is a
key here needs no entry.
"""

from collections.abc import Iterable
from types import MappingProxyType

from torchround.config.errors import nearest

# For each key here the names of other trainers, without their table, in lower case with `_`.
_KEYS = {
    "optimizer.lr": "learning_rate",
    "optimizer.name": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2 adamw_betas beta1 beta2",
    "optimizer.eps": "adam_epsilon adamw_eps epsilon",
    "optimizer.weight_decay": "wd",
    "training.max_norm": "max_grad_norm gradient_clipping grad_clip clip_grad",
    "lr_schedule.decay": "lr_scheduler_type scheduler decay_type",
    "lr_schedule.warmup_steps": "num_warmup_steps warmup warmup_ratio",
    "lr_schedule.min_lr_factor": "min_lr min_lr_ratio",
    "training.steps": "max_steps num_steps train_steps",
    "data.epochs": "num_train_epochs num_epochs",
    "training.micro_batch_size": (
        "per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size"
    ),
    "training.global_batch_size": "batch_size train_batch_size gradient_accumulation_steps grad_accum",
    "training.seq_len": (
        "max_seq_length max_seq_len max_length sequence_length block_size cutoff_len context_length"
    ),
    "training.dtype": "bf16 fp16 torch_dtype precision mixed_precision",
    "model.hf_path": "model_name_or_path model_name base_model pretrained_model_name_or_path",
    "model.family": "model_type",
    "model.flavor": "size",
    "tokenizer.path": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "data.sources": "dataset datasets train_file dataset_name dataset_path data_path dataset_text_field",
    "data.num_workers": "dataloader_num_workers",
    "validation.sources": "validation_file",
    "validation.interval_steps": "eval_steps eval_interval",
    "validation.max_batches": "eval_iters",
    "run.folder": "output_dir save_dir dump_folder",
    "run.name": "run_name experiment_name",
    "run.seed": "random_seed data_seed",
    "checkpoint.interval_steps": "save_steps save_interval checkpoint_interval",
    "checkpoint.keep_latest_k": "save_total_limit",
    "checkpoint.load_path": "resume_from_checkpoint",
    "metrics.log_every_steps": "logging_steps log_interval log_freq",
    "metrics.wandb": "report_to",
    "lora.rank": "lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target_modules",
    "lora.path": "adapter_path",
    "engine.recompute": "gradient_checkpointing activation_checkpointing",
    "engine.num_devices": "num_gpus n_gpus world_size gpus",
    "engine.devices": "device",
    "engine.compile": "torch_compile",
}
USUAL_KEYS = MappingProxyType({name: key for key, names in _KEYS.items() for name in names.split()})

# Another trainer's value -> the value here, whichever key it is given to.
USUAL_VALUES = MappingProxyType(
    {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "gpu": "auto",
        "chat": "messages",
        "conversations": "messages",
        "sharegpt": "messages",
        "constant": "none",
    }
)

_COMPACT = 'optimizer.state = "compact" beside name = "adamw"'
_SIXTEEN_BITS = (
    "nothing: frozen weights have 16 bits, and stay in host memory or, with lora.map_base, in their files"
)
# Another trainer's key or value, or a key of before -> what to write here, or that there is no such thing.
OTHER_WAYS = MappingProxyType(
    {
        "trace.memory": "trace.profiler, whose file has the allocations",
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), _COMPACT),
        **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _SIXTEEN_BITS),
        "on_changed_files": "nothing: a run refuses files that have changed; put the old ones back, or take another run.folder",
    }
)


def other_way(given: str) -> str:
    """Return `; write ..` for a name that no single key or value here stands for; empty if it is not known."""
    way = OTHER_WAYS.get(given.lower().replace("-", "_"))
    return f"; write {way}" if way else ""


def usual_key(given: str) -> str | None:
    """Return the dotted key here that another trainer calls `given`, None if no trainer does."""
    return USUAL_KEYS.get(given.lower().replace("-", "_"))


def nearest_value(given: str, legal: Iterable[str]) -> str:
    """Return `; nearest: x` for the legal value that `given` means elsewhere, or else is spelt like; empty if none is."""
    legal = list(legal)
    meant = USUAL_VALUES.get(given.lower())
    return f"; nearest: {meant}" if meant in legal else other_way(given) or nearest(given, legal)
