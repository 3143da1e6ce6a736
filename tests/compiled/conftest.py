"""Fixtures of the tests of compiled steps."""

from tests.compiled.steps import fresh_compiler as fresh_compiler
