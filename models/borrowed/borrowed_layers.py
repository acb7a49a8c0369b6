"""The three kinds of layers of a borrowed model: its embedding, each block, and its head with the loss.

Each layer shares its children with a module of `transformers`, so a parameter's name in the store is the layer's name
and the path that the parameter has there.

Shapes: B sequences, T tokens, D model width, V vocabulary, N tokens of a micro-batch, n of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import PLANNED_KIND, as_if_on
from torchround.layer import IGNORED_LABEL, LayerWork, MicroBatch, Products
from torchround.models.borrowed.construction import Anatomy
from torchround.models.borrowed.counted_work import count_layer, extrapolate
from torchround.models.borrowed.recognised_parts import UNREAD
from torchround.models.borrowed.shell import BlockCall, StandInBody, hollow, kind_of, with_modules
from torchround.models.common.config import ModelConfigError
from torchround.models.common.lora import init_adapters
from torchround.models.common.loss import (
    Gradients,
    chunk_tokens,
    loss_with_gradients,
    loss_work,
    token_loss_sum,
)

# Lengths by which the cost of longer sequences is found, in blocks that run document by document: linear attention loops over
# its chunks, so counting a million tokens would take an hour.
COUNTED_LENGTHS = (2048, 4096, 8192)


class BorrowedLayer(nn.Module):
    """A layer around `core` of `transformers`, sharing its children."""

    # Compiled code cannot look into the calls that transformers chooses while it runs. Blocks of recognised parts have `code`.
    never_compiled = True
    core: nn.Module
    # The width of the hidden state that the layer gets; None for the first layer.
    width: int | None = None

    def __init__(self, core: nn.Module, anatomy: Anatomy) -> None:
        super().__init__()
        core = with_modules(core, {})  # so that the model of `transformers` stays as it was built
        # The same dictionaries: whatever binds a parameter or replaces a module here, does so in the core too.
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = core.__dict__[kind]
        # Not a child: it would be its own.
        self.__dict__["core"] = core
        # The model's own, which fills one module.
        self.__dict__["initialiser"] = anatomy.model._init_weights
        self.shell = anatomy.shell

    @property
    def longest(self) -> int | None:
        return None if self.shell.longest is None else self.shell.longest[0]

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the parameters as the model's own initialiser does, with numbers of `generator`."""

        def fill(module: nn.Module) -> None:
            module = self.core if module is self else module
            if not hasattr(module, "_init_weights"):  # a model, whose parameters are all of its modules
                self.__dict__["initialiser"](module)

        # The initialisers of transformers draw from the process's generator.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(
                generator.get_state()
            )  # of the host alone: `manual_seed` would reach every accelerator
            self.apply(fill)
            generator.set_state(torch.get_rng_state())
        self.init_adapters(generator)

    init_adapters = init_adapters

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count the cost by a run without memory, once per shape and kind of layer. Raises `ModelConfigError` if too long.

        The cost of a long sequence in a block that may loop over its tokens is found from shorter ones.
        """
        if self.shell.longest is not None and tokens > self.shell.longest[0]:
            most, reason = self.shell.longest
            raise ModelConfigError(
                f"sequences of {tokens} tokens: this model takes {most}, because {reason}; "
                f"legal: training.seq_len up to {most}"
            )
        if getattr(self, "alone", False) and tokens > COUNTED_LENGTHS[-1]:
            works = [self._counted(batch, length, element_bytes, device) for length in COUNTED_LENGTHS]
            return extrapolate(works, COUNTED_LENGTHS, tokens)
        return self._counted(batch, tokens, element_bytes, device)

    def _counted(self, batch: int, tokens: int, element_bytes: int, device: str) -> LayerWork:
        key = (kind_of(self.core), batch, tokens, element_bytes, device)
        if key not in self.shell.counted:
            with as_if_on(device):
                self.shell.counted[key] = count_layer(self, batch, tokens, element_bytes, self.width)
        return self.shell.counted[key]


class BorrowedEmbedding(BorrowedLayer):
    """First layer: the body up to its first block; tokens to `[B, T, D]`."""

    def __init__(self, anatomy: Anatomy) -> None:
        calls: list[tuple[Tensor, BlockCall]] = []
        shell = anatomy.shell
        super().__init__(hollow(anatomy.body, shell.blocks, shell.entries, calls, anatomy.before), anatomy)
        self.calls = calls

    def forward(self, hidden: None, micro_batch: MicroBatch) -> Tensor:
        self.calls.clear()
        self.core(input_ids=micro_batch.tokens, position_ids=micro_batch.positions, use_cache=False)
        hidden_states = self.calls[0][0]
        self.calls.clear()
        return hidden_states


class BorrowedBlock(BorrowedLayer):
    """Block `index`, `[B, T, D]` in and out. With `alone` it has no document mask, and runs each document by itself."""

    def __init__(self, anatomy: Anatomy, index: int) -> None:
        shell = anatomy.shell
        super().__init__(anatomy.body.get_submodule(f"{shell.blocks}.{index}"), anatomy)
        self.width, self.index = shell.width, index
        self.alone = anatomy.alone[index]
        self.never_compiled = self.alone or not (shell.places and shell.places[index])

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        if not self.alone or micro_batch.max_documents == 1:
            call = self.shell.calls_of(hidden, micro_batch)[self.index]
            return call.run(self.core, hidden, micro_batch)
        rows: list[list[Tensor]] = [[] for _ in hidden]
        for row, begin, end, calls in self.shell.calls_by_document(hidden, micro_batch):
            ids = torch.zeros_like(micro_batch.positions[row : row + 1, begin:end])
            whole = MicroBatch(ids, ids, ids, ids, max_documents=1)
            rows[row].append(calls[self.index].run(self.core, hidden[row : row + 1, begin:end], whole))
        return torch.cat([torch.cat(parts, dim=1) for parts in rows])

    def code(self) -> nn.Module:
        """Make what the engine compiles in the block's place: a twin of its core that is called as in `CoreOfTensors`."""
        assert self.width is not None, "only the first layer has none"
        call = self.shell.calls(torch.ones((1, 2, self.width)), torch.arange(2)[None])[self.index]
        twin, kind = with_modules(self.core, {}), cast(Any, type(self.core))
        twin._modules.pop("shell", None)  # a child of the layer, which shares its children with the core
        twin.__class__ = _class_of(kind)
        leaves, twin.structure = torch.utils._pytree.tree_flatten((call.args, call.kwargs))
        twin.leaves = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if hasattr(twin, "layer_idx"):
            twin.layer_idx = UNREAD
        twin._forward_pre_hooks = self._forward_pre_hooks  # they hand out seeds
        return cast(nn.Module, twin)

    def code_inputs(self, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        return hidden, *self.shell.calls_of(hidden, micro_batch)[self.index].tensors()


TENSOR = "a tensor"


class CoreOfTensors(nn.Module):
    """A core that is called with the hidden state, all other tensors, and the micro-batch: a function of tensors to compile.

    The core of a block is called with more: plain values, and places of masks. These are the same for each micro-batch, so
    they become part of the code.
    """

    # The hidden state alone gets a gradient.
    differentiable = 1
    leaves: tuple[Any, ...]
    structure: Any

    def forward(self, inputs: tuple[Tensor, ...], micro_batch: MicroBatch) -> Tensor:
        hidden, *others = inputs
        tensors = iter(others)
        leaves = [next(tensors) if leaf == TENSOR else leaf for leaf in self.leaves]
        call = BlockCall(*torch.utils._pytree.tree_unflatten(leaves, self.structure))
        return call.run(super().forward, hidden, micro_batch)


@cache
def _class_of(core: type) -> type:
    return type(f"{core.__name__}OfTensors", (CoreOfTensors, core), {})


class BorrowedHead(BorrowedLayer):
    """Last layer: what the body does after its blocks, the logits, and the fp32 sum of token losses.

    `tail` names the modules that follow the last block, in order. `projection` names the linear layer whose output is
    the logits; it is None if the model does something else to them, such as a cap.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        tail = {name: anatomy.body.get_submodule(name) for name in anatomy.after}
        free = not tail.keys() & dict(anatomy.model.named_children()).keys()
        assert free, "names of the tail are free in the model"
        outer = with_modules(
            anatomy.model, {anatomy.body_name: StandInBody(anatomy.body, anatomy.output_class), **tail}
        )
        super().__init__(outer, anatomy)
        self.tail, self.projection, self.width = anatomy.after, anatomy.projection, self.shell.width

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        if micro_batch.wants == "logits":
            return self.logits(hidden[:, -1:])[:, 0].float()
        hidden = self.after_blocks(hidden)
        if micro_batch.wants == "states":  # to count them alone
            return hidden
        flat = hidden.flatten(0, 1)  # [B, T, D] -> [N, D]
        labels = micro_batch.labels.flatten()
        if self.projection is not None:
            weight = self.core.get_submodule(self.projection).weight
            return token_loss_sum(flat, weight, labels, micro_batch.loss_factor)  # type: ignore[arg-type]
        vocab = int(self.shell.body.config.vocab_size)  # type: ignore[union-attr,arg-type]
        return any_loss_sum(
            self.project, flat, labels, self._weights(), chunk_tokens(vocab), micro_batch.loss_factor
        )

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count the modules after the blocks, and the loss from its formula: it never has all logits at once."""
        num_tokens, width = batch * tokens, self.shell.width
        with as_if_on(device):
            tail = count_layer(self, batch, tokens, element_bytes, width, wants="states")
            logits = count_layer(self, num_tokens, 1, element_bytes, width, wants="logits")
        flops, vocab = logits.forward_flops - tail.forward_flops, logits.boundary_bytes // (4 * num_tokens)
        weights = [weight for weight in self._weights() if weight.requires_grad]
        loss = loss_work(num_tokens, vocab, width, element_bytes, bool(weights), device)
        # The gradient of the states, beside the one that is kept, while the backward multiplies it.
        scratch = loss.workspace_bytes + num_tokens * width * element_bytes
        if self.projection is None:
            # Autograd keeps each step from the products to the loss, and makes a chunk's whole gradient of the weight.
            scratch += 4 * 4 * vocab * min(num_tokens, chunk_tokens(vocab))
            scratch += sum(weight.numel() for weight in weights) * element_bytes
        products = Products(flops, 0.0 if weights else flops, "head")
        return replace(tail, boundary_bytes=0) + replace(loss, products=(products,), workspace_bytes=scratch)

    def _weights(self) -> list[nn.Parameter]:
        """List the parameters that make the logits from the body's output."""
        own = self.core.named_parameters()
        return [weight for name, weight in own if name.split(".")[0] not in self.tail]

    def after_blocks(self, hidden: Tensor) -> Tensor:
        for name in self.tail:
            hidden = self.core.get_submodule(name)(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(self.after_blocks(hidden))

    def project(self, states: Tensor) -> Tensor:
        """Compute the logits `[B, T, V]` of the body's output `[B, T, D]`, in its dtype."""
        found: Tensor = self.core(inputs_embeds=states, use_cache=False).logits
        return found


def any_loss_sum(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    step: int,
    loss_factor: float | None = None,
) -> Tensor:
    """Add up `-log softmax(logits)[label]` over tokens to fp32 `[]`; ignored labels add nothing.

    It is for logits that a model caps, scales or biases. As in the loss of our own models, both gradients are made in the
    forward, in chunks of `step` tokens, so that memory holds one chunk of logits.

    `logits_of` maps `[1, n, D]` to `[1, n, V]` and may use only `weights`. `hidden` is `[N, D]`, `labels` `[N]` int64.
    `loss_factor` as in `token_loss_sum`.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    compute = partial(_losses_and_gradients, logits_of, hidden, labels, trained, step)
    return loss_with_gradients(compute, loss_factor, hidden, *trained)


def _losses_and_gradients(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    trained: Sequence[Tensor],
    step: int,
    wants: Sequence[bool],
    factor: float,
) -> tuple[Tensor, Gradients]:
    # fp32, because chunks are added up; autograd casts to the dtype of the leaf's gradient.
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained] if any(wants) else []
    of_hidden = torch.empty_like(hidden)
    losses = []
    for start in range(0, len(labels), step):
        rows = slice(start, start + step)
        chunk = hidden[rows].detach().requires_grad_(any(wants))
        with torch.set_grad_enabled(any(wants)):
            logits = logits_of(chunk[None])[0].float()
            loss = F.cross_entropy(logits, labels[rows], ignore_index=IGNORED_LABEL, reduction="sum")
        losses.append(loss.detach())
        if any(wants):
            given = torch.full_like(loss, factor)
            of_hidden[rows], *found = torch.autograd.grad(loss, [chunk, *trained], given, allow_unused=True)
            for total, grad in zip(totals, found, strict=True):
                if grad is not None:
                    total += grad
        del logits, loss
    return torch.stack(losses).sum(), [of_hidden, *totals]
