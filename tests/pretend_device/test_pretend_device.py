"""The pretend device behaves as an accelerator does: it has own memory and random state, refuses mixed devices and counts."""

import pytest
import torch


@pytest.mark.parametrize(
    "mix",
    [
        lambda device, host: device + host,
        lambda device, host: device @ host,
        lambda device, host: torch.cat([device, host]),
        lambda device, host: torch.stack([device[0, 0], host[0, 0]]),
        lambda device, host: host[device.long()],
        lambda device, host: device.index_add_(0, torch.tensor([0]), device[:1].clone()),
        lambda device, host: torch.where(host > 0, device, device),
        lambda device, host: torch.nn.functional.linear(device, host),
        lambda device, host: torch.nn.functional.conv1d(device[None], host[None]),
        lambda device, host: torch.mm(device, device, out=host),
        lambda device, host: device.normal_(generator=torch.Generator()),
    ],
)
def test_mixed_devices_are_refused(pretend, mix):
    host = torch.ones(3, 3)
    with pytest.raises((RuntimeError, NotImplementedError), match="device"):
        mix(host.to(pretend.device), host)


def test_what_cuda_allows_is_allowed(pretend):
    x = torch.arange(6.0, device=pretend.device).view(2, 3)
    assert (x * torch.tensor(2.0)).sum().item() == 30  # a number on the CPU
    assert x[:, torch.tensor([0, 2])].tolist() == [[0, 2], [3, 5]]  # indices on the CPU
    assert (
        torch.randn(3, device=pretend.device, generator=torch.Generator(pretend.device)).device
        == pretend.device
    )


def test_in_place_changes_reach_views(pretend):
    x = torch.zeros(4, 3, device=pretend.device)
    row, flat, turned = x[1], x.view(-1), x.T
    row += 1
    turned[0].mul_(2)
    assert flat.tolist() == [0, 0, 0, 2, 1, 1, 0, 0, 0, 0, 0, 0]
    out = torch.empty(0, device=pretend.device)
    torch.add(x, 1, out=out)  # an output that is resized
    assert out.shape == x.shape and out.sum().item() == 16


def test_random_state_is_the_devices_own(pretend):
    on_cpu = torch.get_rng_state()
    torch.pretend.manual_seed(5)
    first = torch.randn(3, device=pretend.device).cpu()
    assert torch.equal(torch.get_rng_state(), on_cpu)
    with torch.random.fork_rng([0], device_type="pretend"):
        torch.randn(7, device=pretend.device)
    second = torch.randn(3, device=pretend.device).cpu()
    torch.manual_seed(5)  # seeds the devices too
    assert torch.equal(torch.randn(3, device=pretend.device).cpu(), first)
    assert torch.equal(torch.randn(3, device=pretend.device).cpu(), second)


def test_counts(pretend):
    host = torch.ones(4, 4)
    with pretend.count() as counts:
        x = host.to(pretend.device)
    assert (counts.launches, counts.syncs, counts.to_device, counts.bytes_to_device) == (
        0,
        1,
        1,
        64,
    )
    with pretend.count() as counts:
        y = x @ x + 1
    assert (counts.launches, counts.syncs, counts.operators["aten::mm"]) == (2, 0, 1)
    with pretend.count() as counts:
        y.cpu()
    assert (counts.syncs, counts.to_host, counts.bytes_to_host) == (1, 1, 64)
    for wait in (
        lambda: float(y[0, 0]),
        lambda: bool((y > 0).all()),
        lambda: y[y > 0],
        lambda: torch.nonzero(y),
        lambda: torch.equal(x, y),
        lambda: torch.accelerator.synchronize(),
    ):
        with pretend.count() as counts:
            wait()
        assert counts.syncs == 1


def test_pinned_memory_is_copied_without_waiting(pretend):
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    with pretend.count() as counts:
        x = pinned.to(pretend.device, non_blocking=True)
        pinned.copy_(x, non_blocking=True)
    assert (counts.syncs, counts.to_device, counts.to_host) == (0, 1, 1)


def test_memory_is_counted_and_limited(pretend):
    before = pretend.live_bytes()
    x = torch.empty(1000, device=pretend.device)
    y = x + 1
    z = y.view(10, 100)
    assert pretend.live_bytes() == before + 8000
    with (
        pretend.memory_limit(before + 10_000),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        x + y
    del x, y
    assert pretend.live_bytes() == before + 4000
    pretend.reset_peak()
    z + 1
    assert pretend.peak_bytes() == before + 8000
    del z
    assert pretend.live_bytes() == before


def test_failures_are_planted(pretend):
    x = torch.ones(2, 2, device=pretend.device)
    with pretend.failing("aten::mm", after=1):
        x @ x
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            x @ x
        x @ x
    with pretend.failing("aten::mm", sticky=True):
        with pytest.raises(torch.AcceleratorError):
            x @ x
        with pytest.raises(torch.AcceleratorError):
            x + x
    with pretend.failing("aten::mm", kind="runtime", error="CUBLAS_STATUS_ALLOC_FAILED"):
        with pytest.raises(RuntimeError, match="ALLOC_FAILED") as caught:
            x @ x
        assert type(caught.value) is RuntimeError
    with pretend.without_float64(), pytest.raises(TypeError, match="float64"):
        x.double()
    assert (x @ x).sum().item() == 8


def test_autocast(pretend):
    x = torch.ones(2, 2, device=pretend.device)
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.nn.functional.softmax((x @ x), -1).dtype == torch.float32


def test_unavailable_outside_the_fixture(pretend):
    assert torch.accelerator.is_available()
    torch.ops.pretend.set_available(False)
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
