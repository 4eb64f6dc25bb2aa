"""The layer step in real time: lanes, transfers, dispatch and the devices behind
them.
"""
