"""How an owner takes the parts of gradients that other machines send."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import toy_batches
from torchround.machines import links
from torchround.machines.links import Receiver


def test_an_owner_takes_chunks_of_all_peers_in_turn_so_that_all_send_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[int, list[int]] = defaultdict(list)  # for each owner, which peers its chunks come from
    chunks = Receiver.chunks

    def noted(receiver: Receiver, numel: int, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Tensor]]:
        for chunk in chunks(receiver, numel, dtype, what):
            taken[id(receiver._groups)].append(receiver._peer)
            yield chunk

    monkeypatch.setattr(Receiver, "chunks", noted)
    monkeypatch.setattr(links, "CHUNK_BYTES", 256)
    assert_equal_to_one_machine(Case(toy_batches(2, micro_batches=3)), 3)
    assert len(taken) == 3
    for peers in taken.values():
        assert len(peers) > 20
        assert all(peer != following for peer, following in itertools.pairwise(peers))
