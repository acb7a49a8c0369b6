"""What tables demand of each other. No file is opened, and no device or model is needed."""

from collections.abc import Iterator

from torchround.config.tables import Config, PlanTable

Conflict = tuple[str, str]
"""The keys, with spaces between them, and what is legal. The message shows the values too."""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Find what keeps tables, each legal by itself, from being used together."""
    for check in (_model, _training, _update, _validation):
        yield from check(config)


def _model(config: Config) -> Iterator[Conflict]:
    model, tokenizer, lora = config.model, config.tokenizer, config.lora
    clears = 'one of them ("none" clears a key that a base file set)'
    if model.flavor is None and model.shape is None and model.hf_path is None:
        yield "model.flavor model.shape model.hf_path", 'one of them, for example flavor = "debug"'
    for key in ("flavor", "shape"):
        if model.hf_path is not None and getattr(model, key) is not None:
            yield f"model.{key} model.hf_path", clears
    if tokenizer.path is not None and tokenizer.name is not None:
        yield "tokenizer.path tokenizer.name", clears
    for key, wanted in (("map_base", "a folder with the base's files"), ("path", "the base of the adapters")):
        if getattr(lora, key) and lora.rank == 0:
            yield f"lora.{key} lora.rank", "a rank above 0, which trains adapters"
        elif getattr(lora, key) and model.hf_path is None:
            yield f"lora.{key} model.hf_path", wanted
    if config.checkpoint.export == "adapters" and lora.rank == 0:
        yield "checkpoint.export lora.rank", '"weights" if no adapters are trained'
    if config.checkpoint.load == "weights" and config.checkpoint.load_path is None:
        yield "checkpoint.load checkpoint.load_path", "the folder of the checkpoint that holds them"


def _training(config: Config) -> Iterator[Conflict]:
    training, warmup = config.training, config.lr_schedule.warmup_steps
    if training.global_batch_size % config.data.streams:
        yield "data.streams training.global_batch_size", "a batch that is a multiple of the streams"
    if training.fp16_accumulation and training.dtype != "float16":
        yield "training.fp16_accumulation training.dtype", 'true with "float16"'
    # Steps that data.epochs make are checked once they are counted.
    if training.steps is not None and warmup >= training.steps:
        yield (
            "lr_schedule.warmup_steps training.steps",
            f"a warm-up of at most steps - 1 = {training.steps - 1}",
        )


def _update(config: Config) -> Iterator[Conflict]:
    engine, training, optimizer = config.engine, config.training, config.optimizer
    plan = engine.plan if isinstance(engine.plan, PlanTable) else None
    for key, rounds in (("engine.rounds", engine.rounds), ("engine.plan", plan and plan.rounds)):
        if isinstance(rounds, int) and rounds > config.num_micro_batches:
            legal = f"1 to {config.num_micro_batches} rounds, the micro-batches of a step"
            yield f"{key} training.global_batch_size training.micro_batch_size", legal
        if isinstance(rounds, int) and rounds > 1 and engine.update == "bounded":
            yield f"{key} engine.update", "1 round, because the first gradients would wait for the last round"
    if engine.delay_correction == "predict":
        if engine.update != "async":
            yield (
                "engine.delay_correction engine.update",
                '"auto" or "none", or update = "async", which has the delay',
            )
        elif not optimizer.can_predict:
            legal = '"auto" or "none", because the state of this optimizer does not tell its next step'
            yield "engine.delay_correction optimizer.name", legal
    if engine.update != "bounded":
        return
    if training.dtype == "float16":
        yield "engine.update training.dtype", '"bfloat16" or "float32": overflows of float16 skip whole steps'
    if training.max_norm and training.clip == "global":
        yield (
            "engine.update training.clip training.max_norm",
            'training.clip = "layer", or training.max_norm = 0',
        )
    if not optimizer.updates_by_layer:
        legal = '"sync" or "async": updates of this optimizer need the devices, which would wait for each gradient'
        yield "engine.update optimizer.name", legal


def _validation(config: Config) -> Iterator[Conflict]:
    table = config.validation
    is_on = table.interval_steps > 0
    if is_on and not table.sources and not config.data.validation_fraction:
        legal = "at least one source, or a data.validation_fraction above 0, or an interval of 0 for off"
        yield "validation.interval_steps validation.sources data.validation_fraction", legal
    for key in ("keep_best", "patience", "prompts"):
        if getattr(table, key) and not is_on:
            yield (
                f"validation.{key} validation.interval_steps",
                "an interval above 0, which switches validation on",
            )
