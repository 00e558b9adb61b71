"""CUDA's caching allocator, simulated: what a sequence of requests reserves, and where every block lands.

The rules are those of torch's native allocator, written down from its documented and observed behaviour and checked
against recorded histories of real GPUs. Nothing here needs torch or a GPU.

    settings    what `PYTORCH_CUDA_ALLOC_CONF` says
    sizes       how requests are rounded and which segment they need
    blocks      blocks, and the pools that hold the free ones
    device      the memory behind: a capacity and addresses
    caching     the allocator itself
    expandable  segments that grow page by page
    reclaim     what is given back: garbage collection, retry, empty_cache
    history     a recorded history, as plain data
    start       the allocator's state when a recording began
    adopt       that state, put into the simulation
    replay      a history against the simulation, event by event
    requests    the same requests under other settings
"""
