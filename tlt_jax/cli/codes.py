"""How the program ends: its exit codes. Besides, 130 and 143 stand for SIGINT and SIGTERM."""

DONE, FAULT, USER_ERROR, LOST, INTERRUPTED = 0, 1, 2, 3, 130
