"""The model against transformers' GPT-2, an independent implementation."""

import pytest
import torch
from gpt2_reference import copy_weights, is_conv1d, reference_model

from gpt2demo.config import ATTENTIONS, MODELS, VOCAB_SIZES, GPTConfig, RunConfig
from gpt2demo.model import GPT

# published sizes (OpenAI's checkpoints, tied weights counted once)
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
SMALL = GPTConfig(block_size=64, vocab_size=331, n_layer=3, n_head=4, n_embd=48)


def on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    assert on_meta(MODELS[name]).num_params() == PARAMETERS[name]


def test_parameter_count_of_the_padded_vocabulary():
    assert on_meta(RunConfig(vocab_size=50304).gpt).num_params() == 124_475_904


def test_the_tiny_model_is_two_layers_of_64():
    model = on_meta(MODELS["tiny"])
    assert len(model.transformer.h) == 2
    assert model.lm_head.weight.shape == (50257, 64)


def test_state_dict_has_the_names_of_the_checkpoint():
    ours = set(on_meta(MODELS["gpt2"]).state_dict())
    assert ours == set(reference_model(MODELS["gpt2"], "eager", device="meta").state_dict())


def test_the_head_is_tied():
    model = GPT(SMALL)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=2000, n_layer=6, n_head=4, n_embd=256))
    residual = 0.02 / (2 * 6) ** 0.5
    for name, parameter in model.named_parameters():
        if "ln_" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float("weight" in name)))
        elif name.endswith("bias"):
            assert not parameter.any()
        else:
            expected = residual if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
            assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_untrained_loss_is_that_of_a_uniform_guess(name, vocab_size):
    torch.manual_seed(1337)
    model = GPT(RunConfig(model=name, vocab_size=vocab_size).gpt)
    x = torch.randint(50257, (2, 32))
    y = torch.randint(50257, (2, 32))
    with torch.no_grad():
        _, loss = model(x, y)
    assert 10.6 < loss.item() < 11.3  # ln(50257) = 10.82


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_logits_loss_and_gradients_equal_transformers(attention, implementation):
    torch.manual_seed(3)
    ours = GPT(SMALL, attention=attention)
    for parameter in ours.parameters():  # biases and norms away from 0 and 1
        torch.nn.init.normal_(parameter, std=0.2)
    theirs = reference_model(SMALL, implementation)
    copy_weights(ours, theirs)
    x = torch.randint(SMALL.vocab_size, (3, 64))
    y = torch.randint(SMALL.vocab_size, (3, 64))

    logits, loss = ours(x, y)
    loss.backward()
    expected_logits = theirs(x).logits
    expected_loss = torch.nn.functional.cross_entropy(
        expected_logits.view(-1, SMALL.vocab_size), y.view(-1)
    )
    expected_loss.backward()

    assert relative(logits, expected_logits) < 1e-5
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name].grad
        if is_conv1d(name):
            expected = expected.t()  # transformers stores these weights the other way round
        assert relative(parameter.grad, expected) < 1e-5, name


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_position_sees_a_later_token(attention):
    torch.manual_seed(5)
    model = GPT(SMALL, attention=attention)
    x = torch.randint(SMALL.vocab_size, (1, 40))
    changed = x.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


def test_without_targets_there_is_no_loss():
    logits, loss = GPT(SMALL)(torch.zeros(2, 5, dtype=torch.long))
    assert logits.shape == (2, 5, SMALL.vocab_size)
    assert loss is None
