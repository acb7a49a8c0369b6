"""The names that other trainers give to keys and values of this configuration, for messages about unknown ones.

Hugging Face's `TrainingArguments`, PEFT's `LoraConfig`, TRL, DeepSpeed and TorchTitan are what users come from. A name that is a
key here needs no entry.
"""

from collections.abc import Iterable
from types import MappingProxyType

from torchround.config.errors import nearest

# Another trainer's key, without its table, in lower case with `_` -> the key here.
USUAL_KEYS = MappingProxyType(
    {
        "learning_rate": "optimizer.lr",
        "optim": "optimizer.name",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adamw_betas": "optimizer.betas",
        "beta1": "optimizer.betas",
        "beta2": "optimizer.betas",
        "adam_epsilon": "optimizer.eps",
        "adamw_eps": "optimizer.eps",
        "epsilon": "optimizer.eps",
        "wd": "optimizer.weight_decay",
        "max_grad_norm": "training.max_norm",
        "gradient_clipping": "training.max_norm",
        "grad_clip": "training.max_norm",
        "clip_grad": "training.max_norm",
        "lr_scheduler_type": "lr_schedule.decay",
        "scheduler": "lr_schedule.decay",
        "decay_type": "lr_schedule.decay",
        "num_warmup_steps": "lr_schedule.warmup_steps",
        "warmup": "lr_schedule.warmup_steps",
        "warmup_ratio": "lr_schedule.warmup_steps",
        "min_lr": "lr_schedule.min_lr_factor",
        "min_lr_ratio": "lr_schedule.min_lr_factor",
        "max_steps": "training.steps",
        "num_steps": "training.steps",
        "train_steps": "training.steps",
        "num_train_epochs": "data.epochs",
        "num_epochs": "data.epochs",
        "per_device_train_batch_size": "training.micro_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "local_batch_size": "training.micro_batch_size",
        "batch_size": "training.global_batch_size",
        "train_batch_size": "training.global_batch_size",
        "gradient_accumulation_steps": "training.global_batch_size",
        "grad_accum": "training.global_batch_size",
        "max_seq_length": "training.seq_len",
        "max_seq_len": "training.seq_len",
        "max_length": "training.seq_len",
        "sequence_length": "training.seq_len",
        "block_size": "training.seq_len",
        "cutoff_len": "training.seq_len",
        "context_length": "training.seq_len",
        "bf16": "training.dtype",
        "fp16": "training.dtype",
        "torch_dtype": "training.dtype",
        "precision": "training.dtype",
        "mixed_precision": "training.dtype",
        "model_name_or_path": "model.hf_path",
        "model_name": "model.hf_path",
        "base_model": "model.hf_path",
        "pretrained_model_name_or_path": "model.hf_path",
        "model_type": "model.family",
        "size": "model.flavor",
        "tokenizer_name": "tokenizer.path",
        "tokenizer_name_or_path": "tokenizer.path",
        "tokenizer_path": "tokenizer.path",
        "dataset": "data.sources",
        "datasets": "data.sources",
        "train_file": "data.sources",
        "dataset_name": "data.sources",
        "dataset_path": "data.sources",
        "data_path": "data.sources",
        "dataset_text_field": "data.sources",
        "dataloader_num_workers": "data.num_workers",
        "validation_file": "validation.sources",
        "eval_steps": "validation.interval_steps",
        "eval_interval": "validation.interval_steps",
        "eval_iters": "validation.max_batches",
        "output_dir": "run.folder",
        "save_dir": "run.folder",
        "dump_folder": "run.folder",
        "run_name": "run.name",
        "experiment_name": "run.name",
        "random_seed": "run.seed",
        "data_seed": "run.seed",
        "save_steps": "checkpoint.interval_steps",
        "save_interval": "checkpoint.interval_steps",
        "checkpoint_interval": "checkpoint.interval_steps",
        "save_total_limit": "checkpoint.keep_latest_k",
        "resume_from_checkpoint": "checkpoint.load_path",
        "logging_steps": "metrics.log_every_steps",
        "log_interval": "metrics.log_every_steps",
        "log_freq": "metrics.log_every_steps",
        "report_to": "metrics.wandb",
        "lora_r": "lora.rank",
        "r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "target_modules": "lora.targets",
        "lora_target_modules": "lora.targets",
        "adapter_path": "lora.path",
        "gradient_checkpointing": "engine.recompute",
        "activation_checkpointing": "engine.recompute",
        "num_gpus": "engine.num_devices",
        "n_gpus": "engine.num_devices",
        "world_size": "engine.num_devices",
        "gpus": "engine.num_devices",
        "device": "engine.devices",
        "torch_compile": "engine.compile",
    }
)

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

# Another trainer's key or value -> what to write here, or that there is no such thing.
OTHER_WAYS = MappingProxyType(
    {
        "adamw_8bit": 'optimizer.state = "compact" beside name = "adamw"',
        "adamw_bnb_8bit": 'optimizer.state = "compact" beside name = "adamw"',
        "paged_adamw_8bit": 'optimizer.state = "compact" beside name = "adamw"',
        "load_in_4bit": "nothing: frozen weights have 16 bits, and stay in host memory or, with lora.map_base, in their files",
        "on_changed_files": "nothing: a run refuses files that have changed; put the old ones back, or take another run.folder",
        "load_in_8bit": "nothing: frozen weights have 16 bits, and stay in host memory or, with lora.map_base, in their files",
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
