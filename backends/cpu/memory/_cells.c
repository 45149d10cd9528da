/* What `cells.py` does, in machine code, and a full fence; compiled wheels have it.
 *
 * Python needs some ten objects and calls for a message that is one copy and two stores. Orders are
 * C11's, whatever the processor. See docs/design/0033-compiled-modules.md.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
} Cells;

static int
cells_init(Cells *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", NULL};
    PyObject *memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Cells", names, &memory)) {
        return -1;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0) {
        return -1;
    }
    if ((uintptr_t)view.buf % sizeof(uint64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "the memory does not begin at a word of 8 bytes");
        PyBuffer_Release(&view);
        return -1;
    }
    if (self->memory.obj != NULL) {
        PyBuffer_Release(&self->memory);
    }
    self->memory = view;
    return 0;
}

static void
cells_dealloc(Cells *self)
{
    if (self->memory.obj != NULL) {
        PyBuffer_Release(&self->memory);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Whether `nbytes` from byte `at` on are inside the memory; sets an error if not. */
static int
inside(const Cells *self, Py_ssize_t at, Py_ssize_t nbytes)
{
    if (at >= 0 && nbytes >= 0 && at <= self->memory.len && nbytes <= self->memory.len - at) {
        return 1;
    }
    PyErr_Format(PyExc_IndexError, "%zd bytes from byte %zd on are outside a memory of %zd",
                 nbytes, at, self->memory.len);
    return 0;
}

/* The word with index `index`; NULL and an error if there is none. */
static _Atomic uint64_t *
word(const Cells *self, PyObject *index)
{
    Py_ssize_t at = PyLong_AsSsize_t(index);
    if (at == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (at < 0 || at >= self->memory.len / 8) {
        PyErr_Format(PyExc_IndexError, "there is no word %zd in a memory of %zd bytes", at,
                     self->memory.len);
        return NULL;
    }
    return (_Atomic uint64_t *)self->memory.buf + at;
}

static PyObject *
cells_put(Cells *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 6 || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "put() takes at, content (bytes), and two words with "
                                         "what is to be in them");
        return NULL;
    }
    Py_ssize_t at = PyLong_AsSsize_t(args[0]);
    uint64_t size = PyLong_AsUnsignedLongLong(args[3]);
    uint64_t number = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() || !inside(self, at, PyBytes_GET_SIZE(args[1]))) {
        return NULL;
    }
    _Atomic uint64_t *size_word = word(self, args[2]), *number_word = word(self, args[4]);
    if (size_word == NULL || number_word == NULL) {
        return NULL;
    }
    memcpy((char *)self->memory.buf + at, PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1]));
    atomic_store_explicit(size_word, size, memory_order_relaxed);
    atomic_store_explicit(number_word, number, memory_order_release);
    Py_RETURN_NONE;
}

static PyObject *
cells_get(Cells *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "get() takes at and nbytes");
        return NULL;
    }
    Py_ssize_t at = PyLong_AsSsize_t(args[0]), nbytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || !inside(self, at, nbytes)) {
        return NULL;
    }
    return PyBytes_FromStringAndSize((char *)self->memory.buf + at, nbytes);
}

static PyObject *
fence(PyObject *module, PyObject *nothing)
{
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyMethodDef cells_methods[] = {
    {"put", (PyCFunction)(void (*)(void))cells_put, METH_FASTCALL, NULL},
    {"get", (PyCFunction)(void (*)(void))cells_get, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject cells_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cg.backends.cpu.memory._cells.Cells",
    .tp_basicsize = sizeof(Cells),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)cells_init,
    .tp_dealloc = (destructor)cells_dealloc,
    .tp_methods = cells_methods,
};

static PyMethodDef functions[] = {
    {"fence", fence, METH_NOARGS, "A sequentially consistent fence."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_cells",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__cells(void)
{
    PyObject *cells_module = PyModule_Create(&module);
    if (cells_module == NULL || PyType_Ready(&cells_type) < 0
        || PyModule_AddObjectRef(cells_module, "Cells", (PyObject *)&cells_type) < 0) {
        Py_XDECREF(cells_module);
        return NULL;
    }
    return cells_module;
}
