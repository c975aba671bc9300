import gc
import itertools
import os
import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from meshwork.batch import BatchPlan
from meshwork.config import ConfigError
from meshwork.data.loader import (
    BadImage,
    Samples,
    Step,
    eval_steps,
    explain,
    loader,
    sample_seeds,
    step_size,
    train_steps,
)

CPU = torch.device("cpu")


class Numbers:
    """n samples: image index % 256, label index; some of them bad."""

    def __init__(self, n, bad=()):
        self.n, self.bad = n, bad

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index in self.bad:
            raise BadImage(f"/data/no {index}.jpg", "image file is truncated")
        return Image.new("L", (4, 4), index % 256), index


class Drawn:
    """A transform that draws from all three generators."""

    draws = True

    def __call__(self, image):
        numbers = [random.random(), np.random.rand(), torch.rand(1).item()]
        return torch.tensor([image.getpixel((0, 0)), *numbers], dtype=torch.float64)


def pixel(image):
    return torch.tensor(float(image.getpixel((0, 0))))


def still(image):
    return image


still.draws = False


def plan(global_batch, ranks=1, micro=None, coupled=False):
    return BatchPlan.make(global_batch, ranks, micro, coupled)


def take(n_steps, n, batch_plan, rank=0, seed=0, epoch=0, offset=0, drop_last=True):
    steps = train_steps(n, batch_plan, rank, seed, epoch, offset, drop_last)
    return [next(steps) for _ in range(n_steps)]


def ids(steps):
    return [step.indices.tolist() for step in steps]


def all_ids(*shares):
    """Every index of several ranks' steps, sorted."""
    return sorted(itertools.chain.from_iterable(rows for steps in shares for rows in ids(steps)))


def batches(samples, steps, workers, timeout_s=60):
    return list(loader(samples, steps, workers, CPU, timeout_s))


def failure(samples, steps, workers, timeout_s=60):
    """The error that loading ends in; without its frames, which keep worker processes alive."""
    try:
        batches(samples, steps, workers, timeout_s)
    except Exception as error:
        return error.with_traceback(None)


# ---- which rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("global_batch", [30, 64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_joined_over_ranks_a_step_is_the_one_of_a_single_rank(global_batch, ranks):
    alone = take(9, 200, plan(global_batch))
    shared = [take(9, 200, plan(global_batch, ranks), rank) for rank in range(ranks)]
    for step, *parts in zip(alone, *shared, strict=True):
        joined = np.concatenate([part.indices for part in parts])
        assert joined.tolist() == step.indices.tolist()
        assert {part.padded for part in parts} == {-(-global_batch // ranks)}
        assert {part.total for part in parts} == {global_batch}


def test_epochs_hold_each_sample_once_in_another_order_and_ranks_share_none():
    ranks = [take(24, 32, plan(4, 2), rank) for rank in range(2)]
    epochs = []
    for epoch in range(3):
        shares = [steps[8 * epoch : 8 * epoch + 8] for steps in ranks]
        assert all_ids(*shares) == list(range(32))
        epochs.append(ids(shares[0]))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_run_taken_up_at_any_position_goes_on_as_if_unbroken():
    whole = take(20, 50, plan(7), seed=5)
    for k in (1, 6, 7, 8, 15):
        step = whole[k]
        again = take(20 - k, 50, plan(7), seed=5, epoch=step.epoch, offset=step.start)
        assert ids(again) == ids(whole[k:])


def test_another_batch_size_goes_on_with_the_samples_that_are_left():
    before = take(3, 40, plan(8))
    after = take(4, 40, plan(4), offset=24)
    assert all_ids(before, after) == list(range(40))


def test_what_does_not_fill_a_batch_is_left_out_or_a_smaller_padded_step():
    assert [step.total for step in take(4, 23, plan(10, 2))] == [10, 10, 10, 10]
    ranks = [take(6, 23, plan(10, 2), rank, drop_last=False) for rank in range(2)]
    assert [step.total for step in ranks[0]] == [10, 10, 3, 10, 10, 3]
    assert [len(step.indices) for step in ranks[0]] == [5, 5, 1, 5, 5, 1]
    assert {step.padded for steps in ranks for step in steps} == {5}
    assert all_ids(ranks[0][:3], ranks[1][:3]) == list(range(23))


def test_a_last_step_with_less_samples_than_ranks_gives_every_rank_rows():
    for rank in range(4):
        samples = Samples(Numbers(9), pixel, 0, train=True)
        batch = samples[take(2, 9, plan(8, 4), rank, drop_last=False)[1]]
        assert (len(batch), batch.total) == (2, 1)
        assert batch.weight.tolist() == ([1, 0] if rank == 3 else [0, 0])


def test_coupled_models_are_dealt_whole_micro_batches():
    coupled = plan(12, ranks=2, micro=4, coupled=True)
    sizes = [[len(s.indices) for s in take(2, 30, coupled, rank)] for rank in range(2)]
    assert sizes == [[4, 4], [8, 8]]
    assert [step_size(30, coupled, offset, drop_last=False) for offset in (0, 12, 24)] == [
        12,
        12,
        4,
    ]
    assert step_size(30, coupled, 28, drop_last=False) == 0


def test_a_step_that_cannot_be_filled_is_refused():
    with pytest.raises(ConfigError, match=r"3 training samples .* trainer.global_batch_size=3"):
        take(1, 3, plan(8))


def test_the_first_step_of_a_billion_samples_takes_less_than_ten_milliseconds():
    times = []
    for seed in range(5):
        start = time.perf_counter()
        take(1, 10**9, plan(256), seed=seed)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


@pytest.mark.parametrize("n", [1, 2, 3, 23, 24, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_counts_each_sample_once_in_equal_steps_on_every_rank(n, ranks):
    shares = [eval_steps(n, 4, rank, ranks) for rank in range(ranks)]
    assert len({len(steps) for steps in shares}) == 1
    assert all_ids(*shares) == list(range(n))
    assert {step.padded for steps in shares for step in steps} == {4}
    assert sum(step.total for step in shares[0]) == n


# ---- batches -------------------------------------------------------------------------------------


def test_padding_copies_real_rows_and_weighs_nothing():
    batch = Samples(Numbers(10), pixel, 0, train=False)[Step(0, 0, np.array([3, 7]), 5, 2)]
    assert batch.inputs[0].tolist() == [3, 7, 3, 7, 3]
    assert batch.target.tolist() == [3, 7, 3, 7, 3]
    assert batch.weight.tolist() == [1, 1, 0, 0, 0]
    assert batch.weight.dtype == torch.float32


def test_a_rank_without_samples_gives_a_batch_of_padding():
    batch = Samples(Numbers(3), pixel, 0, train=False)[eval_steps(3, 4, 1, 2)[0]]
    assert batch.weight.tolist() == [0, 0, 0, 0]
    assert batch.inputs[0].shape == (4,)


def test_batches_are_equal_for_any_number_of_workers():
    samples = Samples(Numbers(40), Drawn(), seed=1, train=True)
    steps = take(9, 40, plan(9), seed=1)
    alone = batches(samples, steps, 0)
    for workers in (1, 2):
        for a, b in zip(alone, batches(samples, steps, workers), strict=True):
            assert torch.equal(a.inputs[0], b.inputs[0]) and torch.equal(a.target, b.target)


def test_augmentation_is_equal_for_any_number_of_ranks():
    samples = Samples(Numbers(40), Drawn(), seed=1, train=True)
    alone = [samples[step] for step in take(4, 40, plan(10))]
    shared = [[samples[step] for step in take(4, 40, plan(10, 3), rank)] for rank in range(3)]
    for batch, *parts in zip(alone, *shared, strict=True):
        joined = torch.cat([part.inputs[0][part.weight > 0] for part in parts])
        assert torch.equal(joined, batch.inputs[0])


def test_every_sample_and_epoch_has_its_own_draws_and_a_repeat_the_same():
    samples = Samples(Numbers(40), Drawn(), seed=1, train=True)
    steps = take(8, 40, plan(10))
    draws = torch.cat([samples[step].inputs[0][:, 1:] for step in steps])
    for column in draws.T:  # Python, numpy, torch
        assert len(column.unique()) == 80
        assert 0.3 < column.mean() < 0.7
    assert torch.equal(draws, torch.cat([samples[step].inputs[0][:, 1:] for step in steps]))
    other = Samples(Numbers(40), Drawn(), seed=2, train=True)
    assert not torch.equal(other[steps[0]].inputs[0], samples[steps[0]].inputs[0])


def test_seeds_of_samples_depend_on_seed_epoch_index_and_draw():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0)]
    seeds = [sample_seeds(s, e, np.arange(1000), d) for s, e, d in keys]
    assert len(np.unique(np.concatenate(seeds))) == 5000


def test_loading_in_the_training_process_leaves_its_random_numbers_alone():
    def after(work):
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        work()
        return random.random(), np.random.rand(), torch.rand(1).item()

    samples = Samples(Numbers(40), Drawn(), seed=1, train=True)
    steps = take(3, 40, plan(10))
    untouched = after(lambda: None)
    assert after(lambda: batches(samples, steps, 0)) == untouched
    assert after(lambda: batches(samples, steps, 1)) == untouched


def test_nothing_is_seeded_where_nothing_is_drawn():
    class Still(Numbers):
        draws = False

        def __getitem__(self, index):
            return torch.tensor(random.random()), index

    step = take(1, 8, plan(4))[0]
    random.seed(7)
    expected = [random.random() for _ in range(4)]
    random.seed(7)
    found = Samples(Still(8), still, 0, train=True)[step].inputs[0]
    assert torch.allclose(found, torch.tensor(expected))


def test_a_data_set_may_give_pairs_tuples_of_inputs_or_dicts():
    class Given(Numbers):
        def __init__(self, make):
            self.n, self.make = 4, make

        def __getitem__(self, index):
            return self.make(torch.tensor(index))

    def batch(make, inputs=()):
        return Samples(Given(make), pixel, 0, False, inputs)[Step(0, 0, np.arange(2), 3, 2)]

    two = batch(lambda i: ((i, i + 10), i + 20))
    assert [x.tolist() for x in two.inputs] == [[0, 1, 0], [10, 11, 10]]
    assert two.target.tolist() == [20, 21, 20]
    named = batch(lambda i: {"image": i, "mask": i + 1, "box": (i, i)}, ("image", "mask"))
    assert [x.tolist() for x in named.inputs] == [[0, 1, 0], [1, 2, 1]]
    assert [x.tolist() for x in named.target] == [[0, 1, 0], [0, 1, 0]]
    several = batch(lambda i: {"image": i, "a": i + 1, "b": i + 2})
    assert {k: v.tolist() for k, v in several.target.items()} == {"a": [1, 2, 1], "b": [2, 3, 2]}
    with pytest.raises(ConfigError, match=r"no entry 'mask': .*image, label; change task.inputs"):
        batch(lambda i: {"image": i, "label": i}, ("mask",))
    with pytest.raises(ConfigError, match="gave a Tensor: expected a pair"):
        batch(lambda i: i)


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_ends_in_one_line_with_path_and_reason(workers):
    samples = Samples(Numbers(8, bad=(5,)), pixel, 0, train=False)
    error = failure(samples, eval_steps(8, 4, 0, 1), workers)
    assert isinstance(error, BadImage)
    assert str(error) == "cannot read the image /data/no 5.jpg: image file is truncated"
    assert "data.on_bad_image=skip" in explain(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_weigh_nothing_in_evaluation_and_are_listed(workers):
    samples = Samples(Numbers(8, bad=(5, 6)), pixel, 0, train=False, on_bad_image="skip")
    first, second = batches(samples, eval_steps(8, 4, 0, 1), workers)
    assert (first.bad, first.uniform) == ((), True)
    assert second.weight.tolist() == [1, 0, 0, 1]
    assert [path for path, _ in second.bad] == ["/data/no 5.jpg", "/data/no 6.jpg"]
    assert second.bad[0][1] == "image file is truncated"


def test_the_next_good_sample_stands_in_while_training():
    samples = Samples(Numbers(8, bad=(6, 7)), Drawn(), 0, train=True, on_bad_image="skip")
    batch = samples[Step(0, 0, np.array([6, 0]), 2, 2)]
    assert batch.target.tolist() == [0, 0]
    assert batch.weight.tolist() == [1, 1]
    assert not torch.equal(batch.inputs[0][0, 1:], batch.inputs[0][1, 1:])  # its own draws
    assert batch.bad == (("/data/no 6.jpg", "image file is truncated"),)


def test_a_data_set_of_nothing_but_bad_images_is_given_up():
    samples = Samples(Numbers(3, bad=(0, 1, 2)), pixel, 0, train=True, on_bad_image="skip")
    with pytest.raises(BadImage):
        samples[Step(0, 0, np.array([0]), 1, 1)]


class Killing(Numbers):
    def __getitem__(self, index):
        os.kill(os.getpid(), 9)


def test_a_killed_worker_is_explained_as_lack_of_memory():
    error = failure(Samples(Killing(4), pixel, 0, train=False), eval_steps(4, 4, 0, 1), 1)
    assert "memory ran out" in explain(error)
    assert explain(RuntimeError("something else")) is None


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(2)


def test_a_worker_that_gives_nothing_in_time_is_explained():
    samples = Samples(Slow(1), pixel, 0, train=False)
    error = failure(samples, eval_steps(1, 1, 0, 1), 1, timeout_s=0.5)
    assert "runtime.timeout_s" in explain(error)


class Wrong(Numbers):
    def __getitem__(self, index):
        return index


def test_a_wrong_data_set_found_by_a_worker_is_one_sentence():
    error = failure(Samples(Wrong(1), pixel, 0, train=False), eval_steps(1, 1, 0, 1), 1)
    assert isinstance(error, ConfigError)
    assert explain(error).startswith("the data set gave a int: expected a pair")


# ---- memory --------------------------------------------------------------------------------------


class Entries:
    """A sample of a table is its entry's length and the process that read it."""

    draws = False

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        entry = self.table[index]  # a Python object's count of references is written here
        return (0 if isinstance(entry, str) else 1), os.getpid()


def private_mb(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def growth_mb(table, n_steps=12):
    """Growth of the private memory of each of two workers over steps of 10,000 samples."""
    samples, memory = Samples(Entries(table), still, 0, train=True), {}
    gc.freeze()  # else a worker's full collection, which writes to all objects, may fall in here
    steps = itertools.islice(train_steps(len(table), plan(10_000), 0, 0, 0, 0, True), n_steps)
    for batch in loader(samples, steps, 2, CPU, 60):
        pid = int(batch.target[0])
        memory.setdefault(pid, []).append(private_mb(pid))
    gc.unfreeze()
    assert len(memory) == 2
    return max(found[-1] - found[0] for found in memory.values())


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_memory_of_workers_stays_where_it_is_with_a_table_of_two_million_entries():
    assert growth_mb(np.arange(2_000_000)) < 25
    assert growth_mb([str(k) for k in range(2_000_000)]) > 25  # a list of paths fails the check
