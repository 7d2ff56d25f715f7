from .threads import one_thread as one_thread
