"""The demo's transformer computes what its parts say it computes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cumem.errors import InvalidArgument

torch = pytest.importorskip("torch")

from cumem.cli.decoder import Attention, Decoder, DecoderConfig, rotate  # noqa: E402
from cumem.cli.decoding import Decoding  # noqa: E402

CPU = torch.device("cpu")
SMALL = DecoderConfig(layers=3, width=48, heads=6, kv_heads=2, hidden=80, vocab=97)


def make_decoder(config: DecoderConfig = SMALL, seed: int = 3) -> Decoder:
    decoder = Decoder(config, seed=seed, device=CPU, dtype=torch.float32)
    with torch.no_grad():  # weights large enough for attention to matter
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return decoder


def make_tokens(batch: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(SMALL.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_cache(batch: int, context: int) -> torch.Tensor:
    """What lies beyond the position is undefined: here it is NaN, which would spread into anything that read it."""
    return torch.full(SMALL.cache_shape(batch, context), math.nan)


@pytest.mark.parametrize("pieces", [[12], [5] + 7 * [1], 12 * [1], [5, 4, 3], [1, 11]])
def test_cached_decoding_in_any_pieces_equals_the_full_forward(pieces: list[int]) -> None:
    decoder, tokens, cache = make_decoder(), make_tokens(2, 12), make_cache(2, 16)
    with torch.inference_mode():
        full = decoder(tokens)
        parts, start = [], 0
        for piece in pieces:
            parts.append(decoder(tokens[:, start : start + piece], cache, start))
            start += piece
    assert full.std() > 0.5
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-4, atol=1e-4)
    assert cache[:, :, :, :, 12:].isnan().all()


def test_last_gives_the_logits_of_the_last_position_only() -> None:
    decoder, tokens = make_decoder(), make_tokens(2, 9)
    with torch.inference_mode():
        torch.testing.assert_close(decoder(tokens, last=True), decoder(tokens)[:, -1:])


def test_a_later_token_changes_no_earlier_logits_but_an_earlier_one_changes_later_ones() -> None:
    decoder, tokens = make_decoder(), make_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % SMALL.vocab
    with torch.inference_mode():
        before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    difference = (after - before).abs().amax(dim=(0, 2))
    assert (difference[6:] > 1e-3).all(), difference


def test_attention_equals_softmax_over_repeated_key_and_value_heads() -> None:
    attention = Attention(SMALL, device=CPU, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(2, 7, SMALL.width, dtype=torch.float64, generator=generator)
    angles = torch.zeros(7, SMALL.head_width // 2)  # no turn: this is about the heads
    with torch.inference_mode():
        result = attention(x, angles, None, 0)
        query, key, value = (
            part(x).view(2, 7, -1, SMALL.head_width) for part in (attention.query, attention.key, attention.value)
        )
        mixed = torch.zeros_like(query)
        group = SMALL.heads // SMALL.kv_heads
        for head in range(SMALL.heads):
            for position in range(7):
                keys = key[:, : position + 1, head // group]
                scores = torch.einsum("bd,bkd->bk", query[:, position, head], keys) / math.sqrt(SMALL.head_width)
                weights = scores.softmax(dim=-1)
                mixed[:, position, head] = torch.einsum("bk,bkd->bd", weights, value[:, : position + 1, head // group])
        expected = attention.output(mixed.flatten(-2))
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_rotate_keeps_lengths_and_leaves_position_zero_alone() -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.arange(5.0), torch.linspace(1.0, 0.01, 8))
    turned = rotate(x, angles)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])
    assert not torch.allclose(turned[:, :, 1:], x[:, :, 1:])


def test_the_product_of_rotated_vectors_depends_on_the_distance_of_their_positions_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    frequencies = torch.linspace(1.0, 0.01, 8)

    def product(at_query: int, at_key: int) -> float:
        return float((rotate(query, frequencies * float(at_query)) * rotate(key, frequencies * float(at_key))).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_config_counts_the_parameters_that_are_built(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    decoder = Decoder(config, seed=0, device=CPU, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == config.parameters
    assert (decoder.head.weight is decoder.embedding) is tied


def test_one_seed_gives_one_set_of_weights_and_another_seed_another() -> None:
    one, same, other = (list(make_decoder(seed=seed).parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 5}, "width 48 is no multiple of heads 5"),
        ({"kv_heads": 4}, "heads 6 is no multiple of kv_heads 4"),
        ({"heads": 48, "kv_heads": 48}, "width / heads is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_values(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(SMALL, **sizes)


def test_replaying_tokens_into_a_lost_cache_gives_the_same_bits_as_never_losing_it() -> None:
    decoder, prompt, cache = make_decoder(), make_tokens(3, 6), make_cache(3, 32)
    decoding = Decoding(decoder, cache)
    decoding.prefill(prompt)
    before = decoding.generate(8)
    reference = decoding.generate(8)
    logits = decoding.logits
    cache.fill_(math.nan)
    decoding.prefill(prompt)
    decoding.replay(before)
    assert torch.equal(decoding.generate(8), reference)
    assert torch.equal(decoding.logits, logits)
    assert decoding.position == 22


def test_generate_chooses_what_the_full_forward_finds_likeliest() -> None:
    decoder, prompt = make_decoder(), make_tokens(2, 6)
    decoding = Decoding(decoder, make_cache(2, 32))
    decoding.prefill(prompt)
    tokens = decoding.generate(5)
    with torch.inference_mode():
        logits = decoder(torch.cat((prompt, tokens), dim=1))
    assert torch.equal(tokens, logits[:, 5:-1].argmax(dim=-1))


def test_progress_is_told_once_a_token() -> None:
    decoding = Decoding(make_decoder(), make_cache(1, 32))
    calls: list[int] = []
    decoding.prefill(make_tokens(1, 4))
    tokens = decoding.generate(3, lambda: calls.append(1))
    decoding.replay(tokens, lambda: calls.append(2))
    assert calls == [1, 1, 1, 2, 2, 2]
