"""The yardstick itself: fake-quantized layers and the benchmark's arithmetic, on tiny sizes."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import perplexity, sentence_cosine
from benchmarks.fake_quant import FakeQuantLinear, fake_quantize, quantize_rows
from examples.sentence_embeddings import SENTENCES


def test_quantize_rows_by_hand():
    x = torch.tensor([[127.0, -63.5, 0.4, 0.6], [0.0, 0.0, 0.0, 0.0]])
    codes, scale = quantize_rows(x)
    assert codes.tolist() == [[127.0, -64.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    assert scale[0].item() == 1.0
    assert 0 < scale[1].item() < 1e-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_integers_in_range_and_within_half_a_step(dtype):
    x = (torch.randn(5, 7, 33) * 10).to(dtype)
    codes, scale = quantize_rows(x)
    assert codes.dtype == scale.dtype == torch.float32
    assert codes.shape == x.shape
    assert scale.shape == (5, 7, 1)
    assert torch.equal(codes, codes.round())
    assert codes.abs().amax(-1).eq(127).all()
    assert ((codes * scale - x.float()).abs() <= 0.5001 * scale).all()


def test_smallest_and_largest_rows_stay_finite():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest], [1e-45, 0.0], [-0.0, 0.0]])
    codes, scale = quantize_rows(x)
    assert torch.isfinite(codes).all()
    assert torch.isfinite(scale).all()
    assert codes[0].tolist() == [127.0, -127.0]
    assert codes[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("k", [1, 16, 1536])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_equals_an_int64_product(k, bias, dtype):
    linear = nn.Linear(k, 9, bias=bias, dtype=dtype)
    x = torch.randn(3, 4, k).to(dtype)
    x_codes, x_scale = quantize_rows(x)
    w_codes, w_scale = quantize_rows(linear.weight.detach())
    total = (x_codes.long()[..., None, :] * w_codes.long()).sum(-1)
    expected = total.float() * x_scale * w_scale[:, 0]
    if bias:
        expected = expected + linear.bias.detach().float()
    actual = FakeQuantLinear(linear)(x)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected.to(dtype))


def test_layer_is_exact_where_float32_sums_are_not():
    k = 4096
    linear = nn.Linear(k, 1, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    x = torch.ones(1, k)
    x[0, 0] = 0.008  # code 1: the sum is 127 * (127 * 4095 + 1), odd and past 2**24
    layer = FakeQuantLinear(linear)
    codes, scale = quantize_rows(x)
    assert codes[0, 0] == 1
    exact = torch.tensor(127 * (127 * (k - 1) + 1), dtype=torch.float64)
    assert (codes.double() @ layer.w_codes_KN).item() == exact.item()
    assert layer(x).item() == (exact.float() * scale * layer.w_scale_N).item()


def test_layer_follows_float_closely():
    linear = nn.Linear(64, 32)
    x = torch.randn(10, 64)
    with torch.no_grad():
        expected = linear(x)
        error = (FakeQuantLinear(linear)(x) - expected).norm() / expected.norm()
    assert 1e-4 < error < 2e-2


def test_empty_batch():
    assert FakeQuantLinear(nn.Linear(8, 4))(torch.empty(0, 8)).shape == (0, 4)


def test_fake_quantize_replaces_linears_by_whole_components():
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 4), "lm_head2": nn.Linear(4, 4), "body": nn.Linear(4, 4)})
    assert fake_quantize(model) == 2
    assert type(model["lm_head"]) is nn.Linear
    assert isinstance(model["lm_head2"], FakeQuantLinear)
    assert isinstance(model["body"], FakeQuantLinear)


class Uniform(nn.Module):
    """A language model that knows nothing, and counts the windows it sees."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.windows: list[int] = []

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        self.windows.append(input_ids.shape[1])
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocabulary))


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    model = Uniform(17)
    value = perplexity.perplexity(model, torch.arange(11) % 17, context=5)
    assert math.isclose(value, 17, rel_tol=1e-5)
    assert model.windows == [5, 5]  # the one token left predicts nothing


def test_corpus_is_sorted_and_stable():
    from pydoc_data.topics import topics

    text = perplexity.corpus()
    assert text.startswith(topics[min(topics)])
    assert text == "\n\n".join(text for _, text in sorted(topics.items()))
    assert perplexity.sha256("a") == hashlib.sha256(b"a").hexdigest()


def test_perplexity_of_smollm2_is_that_of_a_trained_model(smollm2_folder):
    ids = perplexity.encode(smollm2_folder, perplexity.corpus(), 128)
    rows = perplexity.measure(["bf16", "fake"], smollm2_folder, ids, context=64)
    assert 2 < rows["bf16"].perplexity < 100
    assert abs(rows["fake"].perplexity / rows["bf16"].perplexity - 1) < 0.15
    assert "| int8 fake-quantized eager |" in perplexity.table(rows)


def test_too_short_a_text_is_refused(smollm2_folder):
    with pytest.raises(ValueError, match="the text has 3 tokens, 10 were asked for"):
        perplexity.encode(smollm2_folder, "one two three", 10)


def test_sentence_cosine_of_the_fake_quantized_model(minilm_folder):
    (row,) = sentence_cosine.measure(["fake"], minilm_folder, SENTENCES[:4])
    assert 0.98 < row.minimum <= row.mean < 1
    assert len(set(SENTENCES)) == 20
