"""The only room that looks at the terminal and the environment, and that writes files.

``terminal`` gathers the facts once and hands them on as values, ``bar`` draws progress on stderr, ``files`` writes
reports so that nothing half-written remains.
"""
