"""The text and the batches cut from it."""

import torch

from mcore_patches.demo import corpus

CPU = torch.device("cpu")


def test_text_is_ascii_of_some_length():
    text = torch.cat([corpus.tokens(), corpus.tokens(held_out=True)])
    assert 10_000 < len(text) < 40_000
    assert text.dtype is torch.int64
    assert int(text.min()) >= 10 and int(text.max()) < corpus.VOCABULARY
    words = bytes(text.tolist()).decode("ascii")
    assert words.startswith("THE DECLARATION OF INDEPENDENCE")
    assert words.rstrip().endswith("shall not perish from the earth.")


def test_held_out_text_is_the_end_and_not_trained():
    assert len(corpus.tokens(held_out=True)) == corpus.HELD_OUT_BYTES
    trained, held_out = (bytes(corpus.tokens(held_out=h).tolist()) for h in (False, True))
    assert held_out[:200] not in trained


def test_labels_are_the_next_bytes():
    text = corpus.tokens()
    batch = corpus.batch(text, 3, 50, seed=7, device=CPU)
    assert batch.size == (3, 50)
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert torch.equal(batch.positions, torch.arange(50).expand(3, 50))
    whole = bytes(text.tolist())
    for tokens, labels in zip(batch.tokens, batch.labels):
        assert bytes([*tokens.tolist(), int(labels[-1])]) in whole


def test_batches_depend_on_the_seed_alone():
    text = corpus.tokens()
    one, same, other = (corpus.batch(text, 2, 64, seed=seed, device=CPU) for seed in (1, 1, 2))
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


def test_a_passage_may_be_as_long_as_the_text():
    text = torch.arange(11)
    batch = corpus.batch(text, 1, 10, seed=0, device=CPU)
    assert batch.tokens.tolist() == [list(range(10))]
    assert batch.labels.tolist() == [list(range(1, 11))]
