"""Messages of all wordings, and what their numbers say."""

import pytest

from memfit.doctor.oom_text import advice_of, figures_of, read_message
from memfit.errors import InvalidInput

GIB, MIB = 2**30, 2**20
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 3.50 MiB is free. Including non-PyTorch memory, this process has 79.14 GiB memory in use. Of the "
    "allocated memory 77.85 GiB is allocated by PyTorch, and 812.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 3.00 GiB (GPU 1; 16.00 GiB total capacity; 12.00 GiB already "
    "allocated; 1.50 GiB free; 13.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try"
)
OLDEST = (
    "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already allocated; "
    "0 bytes free; 7.00 GiB cached)"
)
SHARED = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 2 has a total capacty of 24.00 GiB of which 512.00 MiB is "
    "free. Process 41 has 9.00 GiB memory in use. Process 42 has 14.00 GiB memory in use. Of the allocated memory "
    "13.00 GiB is allocated by PyTorch, with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), and 100.00 MiB "
    "is reserved by PyTorch but unallocated."
)


def test_the_numbers_of_todays_message_are_read():
    message = read_message(NEW)
    assert (message.device, message.tried_bytes) == (0, 20 * MIB)
    assert message.unallocated_bytes == 812 * MIB
    assert message.reserved_bytes == message.allocated_bytes + 812 * MIB
    assert message.outside_bytes == message.process_bytes - message.reserved_bytes


def test_the_numbers_of_older_messages_are_read():
    message = read_message(OLD)
    assert (message.device, message.total_bytes, message.free_bytes) == (1, 16 * GIB, 3 * GIB // 2)
    assert message.unallocated_bytes == GIB
    assert read_message(OLDEST).free_bytes == 0
    assert read_message(OLDEST).reserved_bytes == 7 * GIB


def test_processes_and_private_pools_are_read():
    message = read_message(SHARED)
    assert message.private_bytes == 64 * MIB
    assert message.process_bytes == 14 * GIB  # in a container the message does not know itself
    assert message.other_processes_bytes == 9 * GIB


def test_of_several_messages_in_a_log_the_last_counts():
    message = read_message(f"step 1\n{NEW}\nstep 2\n{OLD}\nbye")
    assert (message.tried_bytes, message.messages) == (3 * GIB, 2)


def test_line_breaks_do_not_matter():
    assert read_message(NEW.replace(" ", "\n")).unallocated_bytes == 812 * MIB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NEW, "Fragmentation: PyTorch had 812.00 MiB"),
        (OLD, "Not fragmentation: with 1.00 GiB"),
        (OLD.replace("1.50 GiB free", "2.50 GiB free"), "In part fragmentation"),
        (SHARED, "Other processes hold 9.00 GiB"),
        (OLDEST, "2.00 MiB were missing"),
    ],
)
def test_what_the_numbers_say_together(text, words):
    assert any(words in sentence for sentence in advice_of(read_message(text)))


def test_the_request_is_explained_as_the_segment_that_it_is():
    meanings = {figure.label: figure.meaning for figure in figures_of(read_message(NEW))}
    assert "1 to 10 MiB" in meanings["asked for"]
    assert "at most 1 MiB" in figures_of(read_message(OLDEST))[0].meaning
    assert "rounded up" in figures_of(read_message(OLD))[0].meaning


def test_a_text_without_a_message_is_refused():
    with pytest.raises(InvalidInput, match="no out-of-memory message"):
        read_message("all is well")
