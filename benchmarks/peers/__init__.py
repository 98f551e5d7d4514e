"""The job of the suite ``jobs`` for each library: a module here declares it, is given to the library's own worker command, and
enqueues as many as its argument says when it is run. They run in environments of their own, which do not have ours."""
