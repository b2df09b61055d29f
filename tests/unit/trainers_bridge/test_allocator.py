import platform

import pytest

from trainers_bridge.allocator import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_glibc_takes_both_settings() -> None:
    assert keep_freed_memory()
