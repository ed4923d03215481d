/* A tool that NVTX loads by NVTX_INJECTION64_PATH, as it loads Nsight Systems. It appends one line for each call to the
 * file NVTX_RECORD: process, thread, what was called, the range or 0, domain, category and message, between tabs. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message; /* of a registered string: the handle, which here is its text */
} Attributes;

typedef struct {
    size_t size;
    int (*table)(int module, void ****functions, unsigned *count);
} Callbacks;

enum { CALLBACKS = 1, CORE2 = 5, REGISTERED = 3, NAMES = 64 };
enum { MARK = 1, START, END, PUSH, POP, CATEGORY = 8, STRING = 10, CREATE = 12 };

static const char *categories[NAMES];
static atomic_ullong ranges;

static void note(const char *call, uint64_t range, const char *domain, const Attributes *of) {
    char line[1024];
    const char *category = of && of->category < NAMES && categories[of->category] ? categories[of->category] : "";
    const char *message = of && of->message_type == REGISTERED ? of->message : "";
    int length = snprintf(line, sizeof line, "%d\t%ld\t%s\t%llu\t%s\t%s\t%s\n", getpid(), syscall(SYS_gettid), call,
                          (unsigned long long)range, domain ? domain : "", category, message);
    int file = open(getenv("NVTX_RECORD"), O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (write(file, line, length) != length) abort();
    close(file);
}

static void mark(const char *domain, const Attributes *of) { note("mark", 0, domain, of); }

static uint64_t start(const char *domain, const Attributes *of) {
    uint64_t range = ++ranges;
    note("start", range, domain, of);
    return range;
}

static void end(const char *domain, uint64_t range) { note("end", range, domain, NULL); }

static int push(const char *domain, const Attributes *of) {
    note("push", 0, domain, of);
    return 0;
}

static int pop(const char *domain) {
    note("pop", 0, domain, NULL);
    return 0;
}

static void name_category(const char *domain, uint32_t category, const char *name) {
    if (category < NAMES) categories[category] = strdup(name);
}

static const char *register_string(const char *domain, const char *text) {
    note("string", 0, domain, &(Attributes){.message_type = REGISTERED, .message = text});
    return strdup(text);
}

static const char *create_domain(const char *name) {
    note("domain", 0, name, NULL);
    return strdup(name);
}

int InitializeInjectionNvtx2(const void *(*exported)(uint32_t)) {
    const Callbacks *callbacks = exported(CALLBACKS);
    void ***functions;
    unsigned count;
    if (!callbacks->table(CORE2, &functions, &count)) return 0;
    *functions[MARK] = mark;
    *functions[START] = start;
    *functions[END] = end;
    *functions[PUSH] = push;
    *functions[POP] = pop;
    *functions[CATEGORY] = name_category;
    *functions[STRING] = register_string;
    *functions[CREATE] = create_domain;
    return 1;
}
