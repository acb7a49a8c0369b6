"""The continuations of `validation.prompts`: made by the run's own engine, with the weights of the step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torchround.data.text.tokenizer import Tokenizer
from torchround.engine.engine import Engine
from torchround.generation import generate
from torchround.generation.inference import SAMPLE_CACHE_BYTES
from torchround.observe.record import PromptSample
from torchround.run.several_machines import RunMachines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A text to continue: as it is shown, and as token ids."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class RunSamples:
    """The prompts of a run; it needs a `tokenizer` to have any. A continuation has at most `max_tokens` tokens.

    Each token is the likeliest one, so the text depends on the weights alone, apart from the rounding of logits.
    """

    prompts: Sequence[Prompt] = ()
    max_tokens: int = 64
    tokenizer: Tokenizer | None = None
    stop_tokens: tuple[int, ...] = ()

    def made_by(self, engine: Engine, machines: RunMachines) -> tuple[PromptSample, ...]:
        """Return the continuations with the engine's device weights. All machines call this, and the first one works.

        The others wait, so that each batch of prompts is the same as on one machine. Logits that are not numbers give
        no continuations, and one warning: the step's loss says the same.
        """
        if self.tokenizer is None or not self.prompts:
            return ()
        texts: list[str] = []
        if machines.is_first:
            texts = self._texts(engine, self.tokenizer)
        texts = machines.agree("validation", texts, "the continuations of the prompts")[0]
        return tuple(map(PromptSample, (prompt.text for prompt in self.prompts), texts))

    def _texts(self, engine: Engine, tokenizer: Tokenizer) -> list[str]:
        try:
            continuations = generate(
                engine,
                [prompt.tokens for prompt in self.prompts],
                max_tokens=self.max_tokens,
                stop_tokens=self.stop_tokens,
                cache_bytes=SAMPLE_CACHE_BYTES,
            )
        except ValueError as error:
            logger.warning("validation.prompts are not continued: %s", error)
            return []
        return [tokenizer.decode(without_end(ids, self.stop_tokens)) for ids in continuations]


def without_end(ids: Sequence[int], stop_tokens: Sequence[int]) -> Sequence[int]:
    """Return a continuation without the token that ended it."""
    return ids[:-1] if ids and ids[-1] in stop_tokens else ids
