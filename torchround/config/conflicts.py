"""What tables demand of each other. No file is opened, and no device or model is needed.

Each check yields the keys that cannot be used together as they are, and what is legal. Code that opens a file, a device or a
model checks what that demands.
"""

from collections.abc import Iterator

from torchround.config.config import Config, PlanTable

Conflict = tuple[str, str]
"""The keys, with spaces between them, and what is legal. The message shows the values too."""

CLEARS = '"none" clears a key that a base file set'


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Find what keeps tables, each legal by itself, from being used together."""
    for check in (_model, _sources, _training, _rounds, _bounded, _delay_correction, _validation, _lora):
        yield from check(config)


def _model(config: Config) -> Iterator[Conflict]:
    model, tokenizer = config.model, config.tokenizer
    if model.flavor is None and model.shape is None and model.hf_path is None:
        yield "model.flavor model.shape model.hf_path", 'one of them, for example flavor = "debug"'
    if model.hf_path is not None and model.flavor is not None:
        yield "model.flavor model.hf_path", f"one of them ({CLEARS})"
    if model.hf_path is not None and model.shape is not None:
        yield "model.shape model.hf_path", f"one of them ({CLEARS})"
    if tokenizer.path is not None and tokenizer.name is not None:
        yield "tokenizer.path tokenizer.name", f"one of them ({CLEARS})"
    if tokenizer.path is None and tokenizer.name is None and model.hf_path is None:
        yield "tokenizer.path tokenizer.name model.hf_path", 'path, or name = "bytes", or model.hf_path'


def _sources(config: Config) -> Iterator[Conflict]:
    for table, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        if any(source.module is not None and source.format == "dataset" for source in sources or ()):
            yield f"{table}.sources", 'module, which reads files, or format = "dataset", not both'


def _training(config: Config) -> Iterator[Conflict]:
    training, warmup = config.training, config.lr_schedule.warmup_steps
    if training.micro_batch_size > training.global_batch_size:
        legal = "a micro-batch of at most global_batch_size sequences"
        yield "training.micro_batch_size training.global_batch_size", legal
    if training.fp16_accumulation and training.dtype != "float16":
        yield "training.fp16_accumulation training.dtype", 'true with "float16"'
    # Steps that data.epochs make are checked once they are counted.
    if training.steps is not None and warmup >= training.steps:
        most = training.steps - 1
        legal = f"a warm-up of at most steps - 1 = {most}; for example --lr_schedule.warmup_steps {min(most, training.steps // 10)}"
        yield "lr_schedule.warmup_steps training.steps", legal
    if config.checkpoint.load == "weights" and config.checkpoint.load_path is None:
        yield "checkpoint.load checkpoint.load_path", "the folder of the checkpoint that holds them"


def _rounds(config: Config) -> Iterator[Conflict]:
    engine, batch_keys = config.engine, "training.global_batch_size training.micro_batch_size"
    legal = f"1 to {config.num_micro_batches} rounds, the number of micro-batches of a step"
    if isinstance(engine.rounds, int) and engine.rounds > config.num_micro_batches:
        yield f"engine.rounds {batch_keys}", legal
    if not isinstance(plan := engine.plan, PlanTable):
        return
    if plan.rounds is not None and plan.rounds > config.num_micro_batches:
        yield f"engine.plan {batch_keys}", legal
    if plan.rounds is not None and engine.rounds not in (None, "auto", plan.rounds):
        yield "engine.rounds engine.plan", 'the same, or rounds = "auto"'
    if sum(plan.forward) != sum(plan.backward):
        legal = f"the same number of layers in forward and backward stages, not {sum(plan.forward)} and {sum(plan.backward)}"
        yield "engine.plan", legal
    if plan.kept is not None and engine.keep_activations != "auto":
        yield "engine.keep_activations engine.plan", '"auto" beside a plan that says what is kept'


def _bounded(config: Config) -> Iterator[Conflict]:
    engine, training = config.engine, config.training
    if engine.update != "bounded":
        if engine.stale_layers != "auto":
            yield "engine.stale_layers engine.update", '"auto", or update = "bounded"'
        return
    if training.dtype == "float16":
        legal = '"bfloat16" or "float32", because overflows of float16 skip whole steps'
        yield "engine.update training.dtype", legal
    if training.max_norm and training.clip == "global":
        legal = 'training.clip = "layer", or training.max_norm = 0'
        yield "engine.update training.clip training.max_norm", legal
    rounds = engine.plan.rounds if isinstance(engine.plan, PlanTable) else None
    for key, value in (("engine.rounds", engine.rounds), ("engine.plan", rounds)):
        if value not in (None, 1, "auto"):
            yield f"{key} engine.update", "1 round, because the first gradients would wait for the last round"
    if not config.optimizer.updates_by_layer:
        legal = '"sync" or "async": updates of this optimizer need the devices, which would wait for each gradient'
        yield "engine.update optimizer.name", legal


def _delay_correction(config: Config) -> Iterator[Conflict]:
    if config.engine.delay_correction != "predict":
        return
    if config.engine.update == "bounded":
        legal = '"auto" or "none": "bounded" has one copy of the weights, and the backward still reads those before the update'
        yield "engine.delay_correction engine.update", legal
    elif config.engine.update != "async":
        legal = '"auto" or "none", or update = "async", which has the delay'
        yield "engine.delay_correction engine.update", legal
    elif not config.optimizer.can_predict:
        legal = '"auto" or "none", because the state of this optimizer does not tell its next step'
        yield "engine.delay_correction optimizer.name", legal


def _validation(config: Config) -> Iterator[Conflict]:
    table = config.validation
    is_on = table.interval_steps > 0
    if is_on and not table.sources and not config.data.validation_fraction:
        legal = "at least one source, or a data.validation_fraction above 0, or an interval of 0 for off"
        yield "validation.interval_steps validation.sources data.validation_fraction", legal
    for key in ("keep_best", "patience", "prompts"):
        if getattr(table, key) and not is_on:
            legal = "an interval above 0, which switches validation on"
            yield f"validation.{key} validation.interval_steps", legal
    of_ids = any(source.content == "tokens" for source in (*config.data.sources, *table.sources))
    if table.prompts and of_ids and config.tokenizer.name == "bytes":
        legal = "the tokenizer that made the token ids, because prompts are text"
        yield "validation.prompts data.sources validation.sources tokenizer.name", legal


def _lora(config: Config) -> Iterator[Conflict]:
    lora, hf_path = config.lora, config.model.hf_path
    if config.checkpoint.export == "adapters" and lora.rank == 0:
        yield "checkpoint.export lora.rank", '"weights" if no adapters are trained'
    if lora.map_base and lora.rank == 0:
        yield "lora.map_base lora.rank", "true with adapters (a rank above 0), which freeze the base"
    if lora.map_base and hf_path is None:
        yield "lora.map_base model.hf_path", "a folder with the base's files"
    if lora.path is not None and lora.rank == 0:
        yield "lora.path lora.rank", "the rank of those adapters"
    elif lora.path is not None and hf_path is None:
        yield "lora.path model.hf_path", "the weights that the adapters belong to"
