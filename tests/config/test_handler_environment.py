"""Secrets of the server that a handler's processes don't inherit."""

import pytest

from lmi_core.config.table.option import Outcome
from lmi_core.config.targets.handler_environment import KEY

SECRETS = {"SERVING_ADMIN_KEY": "hunter2", "OPTION_API_KEY": "hunter3"}
OTHERS = {
    "HF_TOKEN": "hub",
    "AWS_SECRET_ACCESS_KEY": "s3",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2",
    "API_KEY": "that of a service which the handler calls",
}


@pytest.fixture
def environment(model_dir, resolved):
    def of(*argv, **environ):
        directory = model_dir("", model__py="def handle(inputs): ...")
        (model,) = resolved(directory, *argv, environ=environ).models
        return model.custom_code_config().environment(environ)

    return of


def test_secrets_of_the_server_stay_with_it(environment):
    assert environment(**SECRETS, **OTHERS) == OTHERS


def test_a_launchers_key_is_one(environment):
    assert environment(API_KEY="k") == {"API_KEY": "k"}
    assert environment(MODEL_ID="x", API_KEY="k") == {"MODEL_ID": "x"}


def test_the_operator_may_pass_them_on(environment):
    names = "SERVING_ADMIN_KEY,OTHER"
    passed = environment("--option", f"handler_environment={names}", **SECRETS)
    assert passed == {"SERVING_ADMIN_KEY": "hunter2"}


def test_a_model_may_not(model_dir, explained):
    directory = model_dir(f"{KEY}=SERVING_ADMIN_KEY\n", model__py="def handle(inputs): ...")
    (error,) = explained(directory, environ=SECRETS).errors
    assert "OPTION_HANDLER_ENVIRONMENT" in error.message


def test_it_is_explained_without_the_secret(model_dir, explained):
    directory = model_dir("", model__py="def handle(inputs): ...")
    (rows,) = explained(directory, environ=SECRETS).rows
    rows = [row for row in rows if row.key.startswith("environment/")]
    assert [row.where for row in rows] == sorted(SECRETS)
    assert {(row.value, row.outcome) for row in rows} == {("********", Outcome.NO_EFFECT)}
