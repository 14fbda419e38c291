"""What the data tests share."""

import chat_templates as t
import pytest


@pytest.fixture
def tokenizer():
    return t.make_tokenizer(t.CHATML)
