"""Packed formats against those who defined them: bitsandbytes, `torch.float8_e4m3fn`, OCP's text and transformers.

The compiled loops and the plain operations both meet the references, bit for bit, on numbers of every size.
"""

import logging
import math
from functools import cache

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torchround import packed_formats
from torchround.hf.packed import dequantise
from torchround.packed_formats import E2M1_VALUES, FORMATS, PIECE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMEL = PIECE + 512  # two pieces, the second a short one
NF4_LEVELS = get_4bit_type("nf4", device="cpu")
NF4_MIDPOINTS = torch.cat(((NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2, torch.ones(1)))


@cache
def trained_matrix():
    """Train the first layer of a small network for 60 steps; its weights have outliers and rows of different sizes."""
    generator = torch.Generator().manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.08, generator=generator)
    inputs = torch.randn(256, 128, generator=generator) * torch.logspace(-2, 1, 128)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (net(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
    return net[0].weight.detach().reshape(-1)


def numbers_of(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(NUMEL, generator=generator)
    powers = torch.randint(-45, 39, (NUMEL,), generator=generator)
    largest = torch.finfo(dtype).max
    numbers = {
        "normal": lambda: normal * 0.02,
        "of all sizes": lambda: normal * 10.0**powers,
        "groups of all sizes": lambda: normal * 10.0 ** powers[::256].repeat_interleave(256),
        "multiples of a quarter, for ties": lambda: torch.randint(-32, 33, (NUMEL,), generator=generator) / 4,
        "midpoints of NF4's levels": lambda: NF4_MIDPOINTS.repeat(NUMEL // 16),
        "a few of the smallest": lambda: torch.randint(-627, 628, (NUMEL,), generator=generator) * 2.0**-149,
        "mostly zeros of both signs": lambda: normal * (powers == 7),
        "denormal": lambda: normal * torch.finfo(dtype).tiny / 50,
        "the smallest": lambda: normal.sign() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
        "the largest": lambda: normal.sign() * largest,
        "trained": trained_matrix,
    }[kind]()
    return numbers.clamp(-largest, largest).to(dtype)


KINDS = (
    *("normal", "of all sizes", "groups of all sizes", "multiples of a quarter, for ties"),
    *("midpoints of NF4's levels", "a few of the smallest", "mostly zeros of both signs", "denormal"),
    *("the smallest", "the largest", "trained"),
)


def nf4_of_bitsandbytes(numbers):
    codes, state = quantize_4bit(numbers, blocksize=64, quant_type="nf4", compress_statistics=False)
    return codes, state.absmax, [dequantize_4bit(codes, state)]


def fp8_of_torch(numbers):
    groups = numbers.float().view(-1, 128)
    scales = groups.abs().amax(1) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (groups / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, [(codes.float() * scales[:, None]).to(numbers.dtype)]


def mxfp4_of_ocp(numbers):
    """Search the nearest of the eight magnitudes, the even code of two, in fp64; decode with two other programs."""
    groups = numbers.double().view(-1, 32)
    largest = groups.abs().amax(1)
    shared = torch.tensor([math.frexp(x)[1] - 3 if x else -127 for x in largest.tolist()]).clamp(min=-127)
    scaled = groups.abs() * 2.0 ** -shared[:, None].double()
    far = (scaled[..., None] - torch.tensor(E2M1_VALUES[:8], dtype=torch.float64)).abs()
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    found = torch.tensor(even_first)[far[..., even_first].argmin(-1)] + 8 * groups.signbit()
    codes = (found[:, ::2] + 16 * found[:, 1::2]).to(torch.uint8)
    scales = (shared + 127).to(torch.uint8)
    decoded = dequantise(codes[None], scales[None]).to(numbers.dtype)
    of_transformers = convert_moe_packed_tensors(codes[None, None], scales[None, None], dtype=numbers.dtype)
    return codes, scales, [decoded, of_transformers]


REFERENCES = {"nf4": nf4_of_bitsandbytes, "fp8": fp8_of_torch, "mxfp4": mxfp4_of_ocp}


@cache
def reference(name, kind, dtype):
    """Return numbers, and their codes, scales and decoded forms: the same for both kinds of loops."""
    numbers = numbers_of(kind, dtype)
    return numbers, *REFERENCES[name](numbers.clone())


@pytest.fixture(params=["compiled", "plain"])
def loops(request, monkeypatch, tmp_path):
    packed_formats._library.cache_clear()
    if request.param == "plain":
        monkeypatch.setenv("CXX", "/nonexistent")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert (packed_formats._library() is None) == (request.param == "plain")
    yield request.param
    packed_formats._library.cache_clear()


def packed_with(form, numbers):
    packed = torch.full((form.nbytes(numbers.numel()),), 77, dtype=torch.uint8)
    form.pack(numbers, packed)
    return packed


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_numbers_are_those_of_the_reference(name, dtype, loops):
    form = FORMATS[name]
    for kind in KINDS:
        given, codes, scales, decoded = reference(name, kind, dtype)
        numbers = given.clone()
        packed = packed_with(form, numbers)
        assert torch.equal(bits(numbers), bits(given)), "packing changed its input"
        at = numbers.numel() * form.code_bits // 8
        assert torch.equal(packed[:at], bits(codes)), kind
        assert torch.equal(packed[at:], bits(scales)), kind
        unpacked = torch.full_like(numbers, 77.0)
        form.unpack(packed, unpacked)
        for expected in decoded:
            assert torch.equal(bits(unpacked), bits(expected)), kind
        assert unpacked.isfinite().all(), kind


@pytest.mark.parametrize("name", FORMATS)
def test_a_zero_stays_one_and_keeps_its_sign_where_the_format_has_one(name):
    numbers = torch.zeros(512)
    numbers[::3], numbers[300:] = -0.0, 1.0
    numbers[310:320] = -0.0
    unpacked = torch.full_like(numbers, 77.0)
    FORMATS[name].unpack(packed_with(FORMATS[name], numbers), unpacked)
    zeros = numbers == 0
    assert (unpacked[zeros] == 0).all()
    assert torch.equal(unpacked[zeros].signbit(), numbers[zeros].signbit() & (name != "nf4"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_that_is_not_finite_is_refused_wherever_it_is(name, loops):
    for dtype in DTYPES:
        for place, number in ((0, math.nan), (PIECE - 1, math.inf), (NUMEL - 1, -math.inf)):
            numbers = numbers_of("normal", dtype)
            numbers[place] = number
            with pytest.raises(ValueError, match="not finite"):
                packed_with(FORMATS[name], numbers)


def test_the_number_of_threads_changes_nothing(monkeypatch):
    numbers = numbers_of("of all sizes", torch.bfloat16).repeat(5)
    for form in FORMATS.values():
        found = []
        for count in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            found.append(packed_with(form, numbers))
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_every_byte_of_a_file_is_decoded_as_its_reference_does():
    """Also the codes and scales that packing never makes: FP8 has two that are no numbers, UE8M0 one."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = torch.empty(256)
    FORMATS["fp8"].unpack(torch.cat((codes, bits(torch.tensor([0.5, 3e37])))), numbers)
    expected = codes.view(torch.float8_e4m3fn).float().view(2, 128) * torch.tensor([[0.5], [3e37]])
    assert torch.equal(bits(numbers), bits(expected))
    codes = codes.repeat_interleave(16)
    scales = torch.arange(256, dtype=torch.uint8)
    numbers = torch.empty(256 * 32, dtype=torch.bfloat16)
    FORMATS["mxfp4"].unpack(torch.cat((codes, scales)), numbers)
    expected = dequantise(codes.view(256, 1, 16), scales[:, None]).bfloat16()
    assert torch.equal(numbers.isnan(), expected.isnan().view(-1))
    assert torch.equal(numbers.nan_to_num(0.0), expected.view(-1).nan_to_num(0.0))


def test_sizes_and_shapes():
    of_bf16 = {name: form.nbytes(2**20) / 2**21 for name, form in FORMATS.items()}
    assert of_bf16 == {"nf4": 0.28125, "fp8": 0.515625, "mxfp4": 0.265625}
    nf4 = FORMATS["nf4"]
    assert nf4.fits((4, 64)) and nf4.fits((3, 8, 128)) and not nf4.fits((256,))
    assert not nf4.fits((128, 32)) and not nf4.fits((2, 64)), "cut groups, or no multiple of 256"


def test_a_missing_compiler_is_said_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    packed_formats._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        packed_with(FORMATS["nf4"], torch.ones(256))
        packed_with(FORMATS["fp8"], torch.ones(256))
    packed_formats._library.cache_clear()
    [record] = caplog.records
    assert "plain operations" in record.getMessage()


def test_loops_of_other_bits_are_not_used(monkeypatch, tmp_path, caplog):
    source = tmp_path / "packed_formats.cpp"
    source.write_text(packed_formats.SOURCE.read_text().replace("scaled > 5.0f", "scaled > 5.5f"))
    monkeypatch.setattr(packed_formats, "SOURCE", source)
    packed_formats._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = packed_with(FORMATS["mxfp4"], numbers_of("normal", torch.float32))
    packed_formats._library.cache_clear()
    assert "does not give the plain operations' bits" in caplog.text
    assert torch.equal(found[: NUMEL // 2], bits(mxfp4_of_ocp(numbers_of("normal", torch.float32))[0]))


@pytest.mark.compiles
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_unpacking_is_one_kernel_without_temporaries_and_of_the_same_bits(name):
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    form, numbers = FORMATS[name], numbers_of("of all sizes", torch.bfloat16)
    packed, plain, compiled = packed_with(form, numbers), torch.empty_like(numbers), torch.empty_like(numbers)
    form.unpack(packed, plain)
    metrics.reset()
    loop, codes = torch.compile(packed_formats.unpack_numbers, fullgraph=True), []

    def run(*arguments):
        codes.append(run_and_get_code(loop, *arguments)[1])

    form.place(packed, len(numbers)).read(compiled, run)
    [[code]] = codes
    assert torch.equal(bits(compiled), bits(plain))
    assert metrics.generated_kernel_count == 1 and " = empty_strided" not in code
