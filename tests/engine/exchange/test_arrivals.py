"""How an owner takes the parts of gradients that other machines send."""

import itertools
from collections import defaultdict

from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import toy_batches
from torchround.machines import links
from torchround.machines.links import PeerLinks, Purpose, Receiver


def test_an_owner_takes_chunks_of_all_peers_in_turn_so_that_all_send_at_once(monkeypatch):
    peers, taken = {}, defaultdict(list)  # for each owner, which peers its chunks come from
    chunks, receiver_of = Receiver.chunks, PeerLinks.receiver

    def noted_receiver(owner, peer, purpose):
        receiver = receiver_of(owner, peer, purpose)
        if purpose is Purpose.GRADIENTS:
            peers[receiver] = (owner, peer)
        return receiver

    def noted(receiver, numel, dtype, what):
        for chunk in chunks(receiver, numel, dtype, what):
            if receiver in peers:
                owner, peer = peers[receiver]
                taken[owner].append(peer)
            yield chunk

    monkeypatch.setattr(PeerLinks, "receiver", noted_receiver)
    monkeypatch.setattr(Receiver, "chunks", noted)
    monkeypatch.setattr(links, "CHUNK_BYTES", 256)
    assert_equal_to_one_machine(Case(toy_batches(2, micro_batches=3)), 3)
    assert len(taken) == 3
    for of_owner in taken.values():
        assert len(of_owner) > 20
        assert all(peer != following for peer, following in itertools.pairwise(of_owner))
