/* The one way to report a failure. */
#include <stdarg.h>
#include <stdio.h>

#include "rksc.h"

rk_status rk_fail(rk_error *err, rk_status status, const char *format, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->status = status;
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
    }
    return status;
}
