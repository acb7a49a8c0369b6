"""The place of a body in the head of a borrowed model."""

from typing import Any

from torch import Tensor, nn


class StandInBody(nn.Module):
    """A body that returns what it is given, so that the model's own forward turns hidden states into logits."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self.output_class = output_class

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)
