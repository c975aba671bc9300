"""What `mode` means: train, validate, test, predict."""

from meshwork import trainer
from meshwork.config import ConfigError
from meshwork.data.loader import eval_steps
from meshwork.job import Job, Outcome, load
from meshwork.predict import predict


def _weights(job: Job) -> Outcome:
    """The outcome so far, with the weights that are to be looked at loaded."""
    outcome = load(job, with_optimizer=False)
    given = outcome.checkpoint or job.cfg.model.checkpoint_path or job.cfg.model.pretrained
    if not given:
        job.report.note(
            "these weights are untrained: give checkpoint.resume=RUN_OR_CHECKPOINT or "
            "model.checkpoint_path"
        )
    return outcome


def _evaluate(job: Job, split: str, dataset: object) -> Outcome:
    if dataset is None:
        raise ConfigError(
            f"mode={job.cfg.mode}: this data has no {split} set (data.root={job.cfg.data.root})"
        )
    outcome = _weights(job)
    outcome.final, outcome.best = {}, None
    trainer.validate(job, trainer.evaluation_set(job, dataset), outcome, True, split)
    outcome.stopped = outcome.unvalidated
    return outcome


def validate(job: Job) -> Outcome:
    """Loss and metrics on the validation set, a confusion matrix and the worst samples."""
    return _evaluate(job, "val", job.data.val)


def test(job: Job) -> Outcome:
    """The same on the test set."""
    return _evaluate(job, "test", job.data.test)


def predict_all(job: Job) -> Outcome:
    """predictions.csv for data.predict_root, else the test set, else the validation set."""
    dataset = next(d for d in (job.data.predict, job.data.test, job.data.val) if d is not None)
    outcome = _weights(job)
    steps = eval_steps(len(dataset), job.plan.evaluated, job.engine.data_rank, job.plan.ranks)
    batches = trainer.evaluation_set(job, dataset)
    parts = (steps, dataset, job.data.classes, job.world, job.stop.agreed, job.run.path)
    with trainer.explained():
        n, bad = predict(job.engine, batches, *parts)
    job.report.bad_images(bad)
    job.report.note(f"{n:,} predictions in {job.run.path / 'predictions.csv'}")
    return outcome


MODES = {"train": trainer.fit, "validate": validate, "test": test, "predict": predict_all}
